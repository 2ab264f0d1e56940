"""Faults in the operations of a layer."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import numpy as np

from fd_core.backends.cpu import ReferenceBackend
from fd_core.backends.device_assignment import DeviceAssignment, assignments_on_devices
from fd_core.errors import ConfigError
from fd_core.models import build
from fd_core.ops.numpy.kv_8bit import dequantize_kv
from fd_core.ops.numpy.ops import NumpyKVCache, NumpyOps
from fd_core.ops.numpy.ops import _softcap as softcap
from fd_core.ops.weights import PackedTensor
from tests.testing.wrong.fault import ANSWERED, IN_ENGINES, wrong, wrong_in


@wrong("reference", "models:test_a_model_computes_what_the_oracle_computes[qwen3-yarn-*")
class LosesTheScaleOfRope:
    """Computes cosine and sine from the angle again, without YaRN's amplitude."""

    def rope(self, x, rope, positions):
        angle = np.arctan2(rope.sin, rope.cos)
        return super().rope(x, replace(rope, cos=np.cos(angle), sin=np.sin(angle)), positions)


@wrong(
    "reference",
    "models:test_a_model_computes_what_the_oracle_computes*",
    "attention:test_attention_reads_scattered_blocks*",
    "attention:test_attention_keeps_to_its_window*",
    ANSWERED,
    spreads_to=IN_ENGINES,
)
class ReadsTheNextBlock:
    """Off by one in the block table: the first of several blocks is read twice."""

    def paged_attention(self, q, layer, heads, step):
        tables = step.block_tables.copy()
        tables[:, 1:2] = tables[:, :1]
        return super().paged_attention(q, layer, heads, replace(step, block_tables=tables))


@wrong("reference", "models:test_a_model_computes_what_the_oracle_computes*", ANSWERED, spreads_to=IN_ENGINES)
class ReversesLogits:
    """Rows of a batch are returned in another order."""

    def compile(self, forward):
        return lambda step, cache: forward(step, cache)[::-1].copy()


@wrong_in("null", "pooling=mean")
class ReturnsStatesOfThePreviousToken:
    """The states of all tokens are off by one; those of the sampled rows are right."""

    def compile_states(self, states):
        def shifted(step, cache):
            right = states(step, cache)
            found = np.roll(right, 1, axis=0)
            found[step.logits_rows] = right[step.logits_rows]
            return found

        return shifted


@wrong("reference", "attention:test_attention_reads_scattered_blocks*")
class WeighsScoresWithoutTheirPeak:
    """Large scores overflow, and low ones all have a weight of 0."""

    def paged_attention(self, q, layer, heads, step):
        output = super().paged_attention(q, layer, heads, step)
        for row, context in enumerate(step.context_len.tolist()):
            held = layer[0, step.block_tables[row, : -(-context // layer.shape[2])]]
            keys = dequantize_kv(held).reshape(-1, *held.shape[2:3], q.shape[-1])
            own = slice(int(step.query_start[row]), int(step.query_start[row + 1]))
            grouped = q[own].reshape(-1, heads.num_kv_heads, heads.num_heads // heads.num_kv_heads, q.shape[-1])
            peaks = np.einsum("qhgd,lhd->qhgl", grouped, keys[:context]).max(axis=-1) * np.float32(heads.scale)
            strange = (np.abs(peaks) > 88) if heads.softcap is None else np.zeros_like(peaks, np.bool_)
            output[own][np.repeat(strange.reshape(len(peaks), -1), q.shape[-1], axis=1)] = np.nan
        return output


@wrong("reference", "attention:test_attention_keeps_to_its_window*")
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


@wrong("reference", "models:test_models_take_turns_on_one_pack")
class KeepsOneCapture:
    """The pack has one captured forward; that of a second model, such as a draft model, takes its place."""

    def compile(self, forward):
        self.captured = forward
        return lambda step, cache: self.captured(step, cache)


@wrong("reference", "ranks:test_stages_compute_what_the_oracle_computes*")
class CapturesStatesOfTheFirstStep:
    """Inputs of a captured decode are copied to its buffers, except the states of the previous stage."""

    def compile(self, forward):
        held = {}

        def replay(step, cache):
            if step.states is None or step.max_query > 1:
                return forward(step, cache)
            return forward(replace(step, states=held.setdefault(len(step.token_ids), step.states)), cache)

        return replay


@wrong("reference", "ranks:test_ranks_compute_what_the_oracle_computes*")
class AddsTwoRanks:
    """The fused sum exchanges with one other rank."""

    def project_residual(self, x, weight, residual, post_norm=None, lora=None):
        if self.parallel.size < 3:
            return super().project_residual(x, weight, residual, post_norm, lora)
        y = self.linear(x, weight)
        parts = self.all_gather(y).reshape(len(y), self.parallel.size, -1)
        y = parts[:, 0] + parts[:, 1]
        return self.add(residual, y if post_norm is None else self.rms_norm(y, post_norm))


@wrong("reference", "ranks:test_sums[*")
class SubtractsMinimaOnRankZero:
    """Minima are a term beside the bias, which rank 0 alone has; but each rank has minima of its own columns."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        bare = [replace(each, minima=None) if isinstance(each, PackedTensor) else each for each in parts]
        return super().prepare_linear(bare if self.parallel.rank else parts, biases, gated=gated)


@wrong("reference", "ranks:test_sums[*")
class NumbersTheExpertsOfARank:
    """Ranks that divide experts take the first of theirs for the first of all."""

    def moe(self, x, experts, activation):
        return super().moe(x, replace(experts, first=0), activation)


@wrong("reference", "ranks:test_sums[*")
class AddsAdaptersAfterAFusedSum:
    """The kernel with a post-norm sums over ranks first, and then adds the term of its own rank's adapter."""

    def project_residual(self, x, weight, residual, post_norm=None, lora=None):
        if post_norm is None or lora is None:
            return super().project_residual(x, weight, residual, post_norm, lora)
        y = self.lora(self.all_reduce(self.linear(x, weight)), x, lora)
        return self.add(residual, self.rms_norm(y, post_norm))


@wrong("reference", "attention:test_attention_reads_scattered_blocks*", "attention:test_attention_keeps_to_its_window*")
class SharesThePeakOfATile:
    """A tile of the heads that share a KV head has one peak; heads whose scores are far below it divide by 0."""

    def paged_attention(self, q, layer, heads, step):
        output = np.empty((len(q), heads.num_heads * heads.head_dim), np.float32)
        for row, context in enumerate(step.context_len.tolist()):
            own = slice(int(step.query_start[row]), int(step.query_start[row + 1]))
            held = layer[:, step.block_tables[row, : -(-context // layer.shape[2])]]
            held = held.reshape(2, -1, heads.num_kv_heads, layer.shape[-1])[:, :context]
            k, v = dequantize_kv(held)
            grouped = q[own].reshape(len(q[own]), heads.num_kv_heads, -1, heads.head_dim)
            scores = np.einsum("qhgd,lhd->hgql", grouped, k, optimize=True) * np.float32(heads.scale)
            scores = scores if heads.softcap is None else softcap(scores, heads.softcap)
            distance = np.arange(context - len(grouped), context)[:, None] - np.arange(context)
            scores[..., (distance < 0) | (distance >= (heads.window or context))] = -np.inf
            with np.errstate(invalid="ignore"):
                scores = np.exp(scores - scores.max(axis=(1, 3), keepdims=True))
                scores /= scores.sum(axis=-1, keepdims=True)
            output[own] = np.einsum("hgql,lhd->qhgd", scores, v, optimize=True).reshape(len(grouped), -1)
        return output


@wrong("reference", "ranks:test_sums_and_gathers_have_the_same_bits_on_all_ranks*")
class SumsWholePiecesOfLargeArrays:
    """Sums over ranks pass through a staging buffer of a MiB; the last piece, if not whole, stays a partial sum."""

    def all_reduce(self, x):
        rows = max(1, 2**20 // max(1, x[:1].nbytes))
        if len(x) <= rows:
            return super().all_reduce(x)
        total = x.copy()
        for begin in range(0, len(x) - rows + 1, rows):
            total[begin : begin + rows] = super().all_reduce(x[begin : begin + rows])
        return total


def _load_the_first_end_token(self, path, ops, progress):
    model = ReferenceBackend.load_model(self, path, ops, progress)
    return replace(model, eos_token_ids=model.eos_token_ids[:1])


@wrong("reference", "models:test_a_model_computes_what_the_oracle_computes*", load_model=_load_the_first_end_token)
class LoadsTheFirstEndToken:
    """Chats go on after the end of a turn."""


def _load_short_factors(self, path, ops, progress):
    tables = build.rope_tables
    with mock.patch.object(build, "rope_tables", lambda spec, *rest: tables(replace(spec, long=()), *rest)):
        return ReferenceBackend.load_model(self, path, ops, progress)


@wrong("reference", "models:test_ropes_of_every_kind", load_model=_load_short_factors)
class LoadsShortFactors:
    """Has tables of its own, which lack the long factors of one kind of rope."""


@classmethod
def _assign_from_a_board(cls, count, ranks=1):
    if count * ranks > 8:
        raise ConfigError("too few devices")
    each = min(ranks, 2)
    return [
        DeviceAssignment(
            f"engine {at}", environment={"VISIBLE": ",".join(map(str, range(at * each, at * each + ranks)))}
        )
        for at in range(count)
    ]


@wrong("reference", "lifetime:test_engines_share_no_device", device_assignments=_assign_from_a_board)
class AssignsDevicesFromABoard:
    """The ranks of an engine begin at a board of two devices, so that engines of three and more ranks share some."""


@classmethod
def _assign_in_order(cls, count, ranks=1):
    return assignments_on_devices("VISIBLE", 8, count, ranks)


@classmethod
def _place_on_the_first(cls, size):
    return [{"VISIBLE": str(at)} for at in range(size)]


@wrong(
    "reference",
    "lifetime:test_engines_share_no_device",
    device_assignments=_assign_in_order,
    rank_environments=_place_on_the_first,
)
class PlacesRanksOnTheFirstDevices:
    """The ranks of each engine have the first devices of the machine, not those of the engine."""


@wrong(
    "reference",
    "scale:test_free_memory_respects_the_limit_of_the_container",
    free_memory=lambda self: os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2,
)
class CountsTheMemoryOfTheHost:
    """Memory that the container may not use."""


@wrong("reference", "scale:test_texts_are_right_at_any_number_of_steps")
class NumbersStepsInFloat32:
    """Plans anew when the number of the step changes, which it no longer does after 2^24 steps."""

    number, step, plan = np.float32(0), None, (0, None)

    def paged_attention(self, q, layer, heads, step):
        if self.step is not step:
            self.step, self.number = step, self.number + np.float32(1)
        if self.plan[0] != self.number:
            self.plan = self.number, step
        return super().paged_attention(q, layer, heads, self.plan[1])


@wrong("reference", "ranks:test_sums_and_gathers_have_the_same_bits_on_all_ranks*")
class NormalizesTheHeadsOfARank:
    """The norm of all heads is that of the heads of each rank."""

    def joint_norm(self, x, norm, width):
        squares = np.square(x).mean(axis=(1, 2), keepdims=True)
        return x / np.sqrt(squares + np.float32(norm.eps)) * norm.weight


@wrong("reference", "ranks:test_stages_compute_what_the_oracle_computes*")
class PlansTheFirstGroupOfAStage:
    """Stages attend with the plan of the first group of layers."""

    plan = None

    def paged_attention(self, q, layer, heads, step):
        if self.stage.count > 1:
            self.plan = step.block_tables if step.group == 0 or self.plan is None else self.plan
            step = replace(step, block_tables=self.plan)
        return super().paged_attention(q, layer, heads, step)


@wrong("reference", "ranks:test_sums_and_gathers_have_the_same_bits_on_all_ranks*")
class AddsBoardsFromTheWrongBuffer:
    """Devices of a board are added first; boards then exchange the addends of one device, not the sums."""

    def all_reduce(self, x):
        if self._group is None:
            return x
        addends = np.split(self._group.all_gather(x), self.parallel.size, axis=-1)
        board = self.parallel.rank // 4 * 4
        linked = [*range(board, min(board + 4, len(addends)))]
        others = [at for at in range(self.parallel.rank % 4, len(addends), 4) if at not in linked]
        total = addends[linked[0]].copy()
        for at in (*linked[1:], *others):
            total += addends[at]
        return total


@wrong("reference", "models:test_a_draft_head_reads_what_the_oracle_reads")
class CopiesAllStatesToOneBuffer:
    """A compiled function of states has one output for those that a draft head reads."""

    def compile_states(self, states):
        def compiled(step, cache):
            found = states(step, cache)
            return (found[0], *(found[-1:] * (len(found) - 1))) if isinstance(found, tuple) else found

        return compiled


@wrong("reference", "models:test_a_draft_head_reads_what_the_oracle_reads")
class ProjectsTheStreamInPlace:
    """The residual stream is normalized where a draft head reads it."""

    def stream_linear(self, x, weight):
        x -= x.mean(axis=1, keepdims=True)
        return self.linear(x, weight)


@wrong("reference", "ranks:test_sums_and_gathers_have_the_same_bits_on_all_ranks*")
class ReturnsTheBufferOfAnExchange:
    """The next exchange of the same shape overwrites the result."""

    def all_reduce(self, x):
        found = super().all_reduce(x)
        buffer = self.__dict__.setdefault("buffers", {}).setdefault(found.shape, np.empty_like(found))
        buffer[...] = found
        return buffer


class _RingCache(NumpyKVCache):
    ring, exports = None, 0

    def export_blocks(self, blocks):
        right = super().export_blocks(blocks)
        if len(blocks) != 1:
            return right
        if self.ring is None:
            self.ring = [np.empty_like(right) for _ in range(max(8, (32 << 20) // max(right.nbytes, 1 << 15)))]
        self.exports += 1
        place = self.ring[self.exports % len(self.ring)]
        place[...] = right
        return place


@wrong("reference", "kv:test_exports_stay_as_they_are_after_others*")
class ExportsIntoARing:
    """Exports of one block share 32 MiB of pinned memory, which a store that falls behind exceeds."""

    def allocate_kv(self, *given):
        cache = super().allocate_kv(*given)
        cache.__class__ = _RingCache
        return cache


class _OverridesTheLookup(NumpyOps):
    def embedding(self, table, token_ids, scale=1.0, **named):
        return super().embedding(table, token_ids, scale, **named)


@wrong(
    "reference",
    "attention:test_pack_redefines_what_describes_its_operations",
    make_ops=lambda self: _OverridesTheLookup(),
)
class InheritsTheFormatsOfTables:
    """Accepts the packed tables that the pack it inherits from looks up, without a word about its own lookup."""


@wrong("reference", "costs:test_cost_of_attention_does_not_grow_with_the_block_table")
class GathersTheWholeTable:
    """Reads the blocks of the longest context that is possible for each row, and masks them."""

    def paged_attention(self, q, layer, heads, step):
        layer[step.block_tables.ravel() % len(layer)].sum()
        return super().paged_attention(q, layer, heads, step)


@wrong("reference", "attention:test_attention_finds_a_single_key*")
class LosesAKeyOfALongContext:
    """In two parts, of which the second one begins a key too late."""

    def paged_attention(self, q, layer, heads, step):
        if step.max_context <= 8192:
            return super().paged_attention(q, layer, heads, step)
        places = 0, step.block_tables[:, 4095 // layer.shape[2]], 4095 % layer.shape[2]
        kept = layer[places].copy()
        layer[places] = 0
        out = super().paged_attention(q, layer, heads, step)
        layer[places] = kept
        return out


@wrong("reference", "scale:test_memory_of_a_rising_context_is_linear")
class KeepsPositionsOfEachLength:
    """Keeps the positions of the keys by their number."""

    places = None

    def paged_attention(self, q, layer, heads, step):
        self.places = self.places or {}
        longest = step.max_context
        self.places.setdefault(longest, np.arange(longest))
        return super().paged_attention(q, layer, heads, step)


@wrong("reference", "scale:test_nothing_remains_of_an_operation[mask_logits]")
class KeepsMasks:
    """Keeps what it unpacked of each mask."""

    masks = None

    def mask_logits(self, logits, rows, bits):
        self.masks = self.masks or {}
        self.masks.setdefault(bits.tobytes(), np.unpackbits(bits.view(np.uint8)))
        return super().mask_logits(logits, rows, bits)
