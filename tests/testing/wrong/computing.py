"""Faults in the operations of a layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fd_core.ops.numpy.kv_int8 import dequantize_kv
from fd_core.ops.numpy.ops import NumpyLinear
from fd_core.ops.weights import FP8, PackedTensor
from fd_core.runner.inputs.inputs import adapter_rows
from tests.testing.wrong.fault import wrong


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition[biases]",
    "models:test_a_model_computes_what_the_oracle_computes[ernie-*",
    "models:test_a_model_computes_what_the_oracle_computes[ernie-moe-*",
    "models:test_a_model_computes_what_the_oracle_computes[llama-biases-wide-heads-*",
    "models:test_a_model_computes_what_the_oracle_computes[qwen2-*",
    "models:test_a_model_computes_what_the_oracle_computes[qwen2-window-*",
    "operations:test_linear_adds_its_biases",
    "operations:test_packed_weights_equal_what_they_stand_for*",
)
class DropsBiases:
    def prepare_linear(self, parts, biases=None, *, gated=False):
        return super().prepare_linear(parts, None, gated=gated)


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition[packed Q4_1]",
    *(f"operations:test_packed_weights_equal_what_they_stand_for[{kind}]" for kind in ("Q4_1", "Q5_K", "awq", "gptq")),
    spreads_to=("operations:test_packed_weights_equal_what_they_stand_for*",),
)
class ForgetsTheMinimaOfPackedWeights:
    def prepare_linear(self, parts, biases=None, *, gated=False):
        parts = [replace(part, minima=None) if isinstance(part, PackedTensor) else part for part in parts]
        return super().prepare_linear(parts, biases, gated=gated)


@wrong("reference", "operations:test_packed_weights_equal_what_they_stand_for[F8_E4M3]")
class ReadsFloat8AsInt8:
    def prepare_linear(self, parts, biases=None, *, gated=False):
        fp8 = [part for part in parts if isinstance(part, PackedTensor) and part.format == FP8]
        parts = [replace(part, format="int8") for part in fp8] if fp8 else parts
        return super().prepare_linear(parts, biases, gated=gated)


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition[window]",
    "models:test_a_model_computes_what_the_oracle_computes[gemma3-*",
    "models:test_a_model_computes_what_the_oracle_computes[mistral-window-*",
    "models:test_a_model_computes_what_the_oracle_computes[qwen2-window-*",
    "operations:test_attention_keeps_to_its_window*",
)
class ForgetsTheWindow:
    def paged_attention(self, q, layer, heads, step):
        return super().paged_attention(q, layer, replace(heads, window=None), step)


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition[window]",
    "models:test_a_model_computes_what_the_oracle_computes[gemma3-*",
    "models:test_a_model_computes_what_the_oracle_computes[mistral-window-*",
    "models:test_a_model_computes_what_the_oracle_computes[qwen2-window-*",
    "operations:test_attention_keeps_to_its_window*",
)
class WindowIsOneTooWide:
    def paged_attention(self, q, layer, heads, step):
        wider = None if heads.window is None else heads.window + 1
        return super().paged_attention(q, layer, replace(heads, window=wider), step)


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition[softcap]",
    "operations:test_attention_caps_its_scores*",
)
class ForgetsTheSoftcapOfScores:
    def paged_attention(self, q, layer, heads, step):
        return super().paged_attention(q, layer, replace(heads, softcap=None), step)


@wrong(
    "reference",
    "models:test_a_model_computes_what_the_oracle_computes[gemma3-*",
    "operations:test_logits_are_softly_capped",
)
class ForgetsTheSoftcapOfLogits:
    def logits_of(self, x, head, softcap):
        return super().logits_of(x, head, None)


@wrong(
    "reference",
    "models:test_a_model_computes_what_the_oracle_computes[qwen3-yarn-*",
    "operations:test_rope_keeps_the_amplitude_of_its_tables",
)
class LosesTheScaleOfRope:
    """Computes cosine and sine from the angle again, without YaRN's amplitude."""

    def rope(self, x, rope, positions):
        angle = np.arctan2(rope.sin, rope.cos)
        return super().rope(x, replace(rope, cos=np.cos(angle), sin=np.sin(angle)), positions)


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition[neighbours]",
    "models:test_a_model_computes_what_the_oracle_computes[ernie-*",
    "models:test_a_model_computes_what_the_oracle_computes[ernie-moe-*",
    "operations:test_rope_turns_pairs_and_leaves_the_rest*",
)
class RotatesHalvesOnly:
    def rope(self, x, rope, positions):
        return super().rope(x, replace(rope, interleaved=False), positions)


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition*",
    "models:test_adapters_in_one_batch_compute_what_merged_weights_compute*",
    "models:test_a_model_computes_what_the_oracle_computes*",
    "operations:test_attention_reads_scattered_blocks*",
    "operations:test_attention_keeps_to_its_window*",
    "operations:test_attention_caps_its_scores*",
    "signals:test_rows_next_to_a_revocation_keep_their_tokens*",
    "signals:test_unfinished_chunk_delivers_nothing",
    "signals:test_a_slot_that_is_used_again_starts_anew",
    "signals:test_rejected_drafts_are_empty_and_accepted_ones_are_not*",
    "operations:test_later_steps_with_other_shapes_are_planned_anew",
    spreads_to=(
        "budget:*",
        "golden:*",
        "kv:*",
        "signals:*",
    ),
)
class ReadsTheNextBlock:
    """Off by one in the block table: the first of several blocks is read twice."""

    def paged_attention(self, q, layer, heads, step):
        tables = step.block_tables.copy()
        tables[:, 1:2] = tables[:, :1]
        return super().paged_attention(q, layer, heads, replace(step, block_tables=tables))


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition[head norms]",
    "models:test_a_model_computes_what_the_oracle_computes[gemma3-*",
    "models:test_a_model_computes_what_the_oracle_computes[qwen3-moe-*",
    "models:test_a_model_computes_what_the_oracle_computes[qwen3-yarn-*",
    spreads_to=("models:test_adapters_in_one_batch_compute_what_merged_weights_compute*",),
)
class SkipsTheNormOfKeys:
    def attention_inputs(self, x, norm, qkv, heads, layer, step, lora=None):
        return super().attention_inputs(x, norm, qkv, replace(heads, k_norm=None), layer, step, lora)


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition[norms after]",
    "models:test_a_model_computes_what_the_oracle_computes[gemma3-*",
    spreads_to=(
        "fusions:test_fusions_equal_the_composition[adapters, norms after]",
        "models:test_adapters_in_one_batch_compute_what_merged_weights_compute[gemma3-*",
    ),
)
class ForgetsThePostNorm:
    """An override of a fusion that omits the post-norm, which only Gemma has."""

    def project_residual(self, x, weight, residual, post_norm=None, lora=None):
        return super().project_residual(x, weight, residual, None, lora)


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition*",
    "models:test_a_model_computes_what_the_oracle_computes*",
    "models:test_adapters_in_one_batch_compute_what_merged_weights_compute*",
    "operations:test_gate_and_up_are_consecutive",
    "operations:test_gated_linear_activates_the_gate*",
    "operations:test_packed_weights_equal_what_they_stand_for*",
    "operations:test_moe_adds_the_weighted_outputs_of_the_chosen_experts*",
    "signals:test_rows_next_to_a_revocation_keep_their_tokens*",
    "signals:test_unfinished_chunk_delivers_nothing",
    "signals:test_a_slot_that_is_used_again_starts_anew",
    "signals:test_rejected_drafts_are_empty_and_accepted_ones_are_not*",
    spreads_to=(
        "budget:*",
        "golden:*",
        "kv:*",
        "signals:*",
    ),
)
class SwapsGateAndUp:
    def prepare_linear(self, parts, biases=None, *, gated=False):
        return super().prepare_linear(list(parts)[::-1] if gated else parts, biases, gated=gated)


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition[shared experts]",
    "models:test_a_model_computes_what_the_oracle_computes[ernie-moe-*",
    "operations:test_moe_adds_the_weighted_outputs_of_the_chosen_experts[corrected]",
    "operations:test_moe_adds_the_weighted_outputs_of_the_chosen_experts[normalized-corrected]",
)
class WeighsExpertsWithTheirCorrection:
    def moe(self, x, experts, activation):
        if experts.correction_bias is None:
            return super().moe(x, experts, activation)
        shifted = replace(experts, router=experts.router * np.float32(1.05))
        return super().moe(x, shifted, activation)


@wrong(
    "reference",
    "fusions:test_fusions_equal_the_composition[shared experts]",
    "models:test_a_model_computes_what_the_oracle_computes[ernie-moe-*",
    "operations:test_moe_adds_the_weighted_outputs_of_the_chosen_experts*",
)
class ForgetsSharedExperts:
    def moe(self, x, experts, activation):
        return super().moe(x, replace(experts, shared_gate_up=None, shared_down=None), activation)


@wrong(
    "reference",
    "models:test_a_model_computes_what_the_oracle_computes[gemma3-*",
    "operations:test_embedding_looks_up_and_scales_rows",
)
class ForgetsTheScaleOfEmbeddings:
    def embedding(self, table, token_ids, scale=1.0):
        return super().embedding(table, token_ids, 1.0)


@wrong(
    "reference",
    "models:test_a_model_computes_what_the_oracle_computes*",
    "signals:test_rows_next_to_a_revocation_keep_their_tokens*",
    "signals:test_rejected_drafts_are_empty_and_accepted_ones_are_not*",
    spreads_to=(
        "budget:*",
        "golden:*",
        "kv:*",
        "signals:*",
    ),
)
class ReversesLogits:
    """Rows of a batch are returned in another order."""

    def compile(self, forward):
        return lambda step, cache: forward(step, cache)[::-1].copy()


@wrong(
    "reference",
    "operations:test_weights_of_every_type_keep_their_values*",
    "operations:test_packed_weights_equal_what_they_stand_for*",
    "fusions:test_fusions_equal_the_composition[packed Q4_1]",
)
class RoundsFloat16Weights:
    """float16 weights lose their fractional part."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        if parts[0].dtype == "F16":
            return NumpyLinear(np.concatenate([np.trunc(part.to_float32()) for part in parts]), None)
        return super().prepare_linear(parts, biases, gated=gated)


@wrong(
    "null",
    "golden:test_log_probabilities_of_prompts_are_the_oracles*",
    "golden:test_log_probabilities_of_prompts_survive_preemption",
    "golden:test_vectors_of_prompts_are_the_oracles*",
)
class ReturnsStatesOfThePreviousToken:
    """The states of all tokens are off by one; those of the sampled rows are right."""

    def compile_states(self, states):
        def shifted(step, cache):
            right = states(step, cache)
            found = np.roll(right, 1, axis=0)
            found[step.logits_rows] = right[step.logits_rows]
            return found

        return shifted


@wrong(
    "reference",
    "operations:test_the_numbers_of_an_adapter_reach_no_token_of_another",
)
class WeighsAdaptersInsteadOfSelecting:
    """Right as long as every product is finite."""

    def lora(self, y, x, lora):
        for index, delta in enumerate(lora.deltas, 1):
            if delta is not None:
                mine = (lora.step.lora_slots == index)[:, None]
                y = y + self.linear(self.linear(x, delta[0]), delta[1]) * mine.astype(np.float32)
        return y


@wrong(
    "reference",
    "models:test_adapters_in_one_batch_compute_what_merged_weights_compute*",
    "fusions:test_fusions_equal_the_composition[adapters*",
    "operations:test_lora_adds_the_delta_of_each_tokens_adapter*",
    spreads_to=("operations:test_the_numbers_of_an_adapter_reach_no_token_of_another",),
)
class AppliesTheAdapterOfThePreviousToken:
    def lora(self, y, x, lora):
        rows = adapter_rows(np.roll(lora.step.lora_slots, 1), self)
        return super().lora(y, x, replace(lora, step=replace(lora.step, **rows)))


@wrong("reference", "operations:test_attention_reads_scattered_blocks*")
class WeighsScoresWithoutTheirPeak:
    """Large scores overflow, and low ones all have a weight of 0."""

    def paged_attention(self, q, layer, heads, step):
        output = super().paged_attention(q, layer, heads, step)
        for row, context in enumerate(step.context_len.tolist()):
            held = layer[0, step.block_tables[row, : -(-context // layer.shape[2])]]
            keys = (dequantize_kv(held) if layer.dtype == np.int8 else held).reshape(-1, *held.shape[2:3], q.shape[-1])
            own = slice(int(step.query_start[row]), int(step.query_start[row + 1]))
            grouped = q[own].reshape(-1, heads.num_kv_heads, heads.num_heads // heads.num_kv_heads, q.shape[-1])
            peaks = np.einsum("qhgd,lhd->qhgl", grouped, keys[:context]).max(axis=-1) * np.float32(heads.scale)
            strange = (np.abs(peaks) > 88) if heads.softcap is None else np.zeros_like(peaks, np.bool_)
            output[own][np.repeat(strange.reshape(len(peaks), -1), q.shape[-1], axis=1)] = np.nan
        return output


@wrong("reference", "operations:test_attention_keeps_to_its_window*")
class TakesThePeakOfHiddenScores:
    """Scores that a window hides count for the peak; below it, all weights are 0."""

    def paged_attention(self, q, layer, heads, step):
        output = super().paged_attention(q, layer, heads, step)
        if heads.window is None or layer.dtype == np.int8:
            return output
        for row, context in enumerate(step.context_len.tolist()):
            keys = layer[0, step.block_tables[row, : -(-context // layer.shape[2])]].reshape(-1, *layer.shape[3:])
            own = slice(int(step.query_start[row]), int(step.query_start[row + 1]))
            grouped = q[own].reshape(-1, heads.num_kv_heads, heads.num_heads // heads.num_kv_heads, q.shape[-1])
            scores = np.einsum("qhgd,lhd->qhgl", grouped, keys[:context]) * np.float32(heads.scale)
            count = len(grouped)
            distance = np.arange(context - count, context)[:, None] - np.arange(context)
            visible = ((distance >= 0) & (distance < heads.window))[:, None, None]
            peaks = np.where(visible, scores, -np.inf).max(axis=-1)
            lost = (scores.max(axis=-1) - peaks > 103).reshape(count, -1)
            output[own][np.repeat(lost, q.shape[-1], axis=1)] = np.nan
        return output
