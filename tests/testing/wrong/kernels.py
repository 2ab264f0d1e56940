"""Packs with one ordinary fault of a kernel each, and values of the kit's axes that show it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fd_core.ops.numpy.kv_int8 import quantize_kv
from fd_core.ops.numpy.ops import NumpyLinear, NumpyOps
from fd_core.runner.inputs.inputs import adapter_rows

FAULTS: dict[str, KernelFault] = {}


@dataclass(frozen=True)
class KernelFault:
    """A wrong pack, and the part whose cases with these values have to detect it."""

    pack: type[NumpyOps]
    part: str
    values: dict[str, object]


def shown_by(part: str, **values: object):
    def register(pack: type[NumpyOps]) -> type[NumpyOps]:
        FAULTS[pack.__name__] = KernelFault(pack, part, values)
        return pack

    return register


# Layers --------------------------------------------------------------------------------------------------------------


@shown_by("layer", group=6)
class RoundsGroupsToPowersOfTwo(NumpyOps):
    """Query heads are mapped to KV heads by a shift; the last ones read a head too many."""

    def paged_attention(self, q, layer, heads, step):
        group = heads.num_heads // heads.num_kv_heads
        shift = max(group.bit_length() - 1, 0)
        mapped = np.minimum(np.arange(heads.num_heads) >> shift, heads.num_kv_heads - 1)
        return self.with_head_map(q, layer, heads, step, mapped)

    def with_head_map(self, q, layer, heads, step, mapped):
        picked = layer[:, :, :, mapped]
        return super().paged_attention(q, picked, replace(heads, num_kv_heads=heads.num_heads), step)


@shown_by("layer", decodes=193)
class DecodesAtMost192Rows(NumpyOps):
    """A grid of 192: later rows keep what was in the output before."""

    def paged_attention(self, q, layer, heads, step):
        out = super().paged_attention(q, layer, heads, step)
        if step.max_query == 1 and len(step.context_len) > 192:
            out[192:] = 0
        return out


@shown_by("layer", chunk=1030)
class AttendsToTheFirst1024TokensOfAChunk(NumpyOps):
    def paged_attention(self, q, layer, heads, step):
        out = super().paged_attention(q, layer, heads, step)
        for start, end in zip(step.query_start, step.query_start[1:], strict=False):
            out[start + 1024 : end] = 0
        return out


@shown_by("layer", context=16_385)
class RotatesTheFirst16384Positions(NumpyOps):
    def rope(self, x, rope, positions):
        return super().rope(x, rope, np.minimum(positions, 16_383))


@shown_by("layer", context=4097, kv_dtype="int8")
class DequantizesTwoThousandTokensOfAContext(NumpyOps):
    """Scales of an 8-bit cache are staged in a buffer of 2,048 entries, which wraps."""

    def paged_attention(self, q, layer, heads, step):
        if layer.dtype != np.int8:
            return super().paged_attention(q, layer, heads, step)
        packed = layer.copy()
        for row, context in enumerate(step.context_len.tolist()):
            places = np.arange(2048, context)
            blocks, offsets = step.block_tables[row, places // layer.shape[2]], places % layer.shape[2]
            early = step.block_tables[row, (places - 2048) // layer.shape[2]], (places - 2048) % layer.shape[2]
            packed[:, blocks, offsets, :, -4:] = layer[:, early[0], early[1], :, -4:]
        return super().paged_attention(q, packed, heads, step)


@shown_by("kv", kv_dtype="int8", kv_heads=8)
class SharesTheScaleOfHeads(NumpyOps):
    """One scale for all heads of a token."""

    def write_kv(self, layer, k, v, kv_slots):
        if layer.dtype == np.int8:
            blocks, offsets = np.divmod(kv_slots, layer.shape[2])
            for side, x in enumerate((k, v)):
                flat = quantize_kv(x.reshape(len(x), -1))
                steps = flat[:, :-4].reshape(x.shape)
                scale = np.broadcast_to(flat[:, None, -4:], (*x.shape[:2], 4))
                layer[side, blocks, offsets] = np.concatenate([steps, scale], axis=-1)
        else:
            super().write_kv(layer, k, v, kv_slots)


@shown_by("layer", shared_blocks=20)
class ReadsSharedBlocksOnce(NumpyOps):
    """Common blocks are loaded for the first row of a tile of eight only."""

    def paged_attention(self, q, layer, heads, step):
        tables = step.block_tables.copy()
        for row in range(1, len(tables)):
            if row % 8 and step.context_len[row] > 60 and (tables[row, 1:4] == tables[row - 1, 1:4]).all():
                tables[row, 1] = tables[row, 0]
        return super().paged_attention(q, layer, heads, replace(step, block_tables=tables))


@shown_by("layer", uniform=True, drafts=3)
class TakesUniformStepsForSingleTokens(NumpyOps):
    """Uniform steps are replayed with one token per row."""

    def paged_attention(self, q, layer, heads, step):
        out = super().paged_attention(q, layer, heads, step)
        if step.uniform and step.max_query > 1:
            out[1 :: step.max_query] = out[:: step.max_query]
        return out


# Products ------------------------------------------------------------------------------------------------------------


@shown_by("linear", inputs=4104)
class DropsTheTailOfALongProduct(NumpyOps):
    """Above 4,096 inputs, only whole tiles of 64 are multiplied."""

    def linear(self, x, weight):
        inputs = x.shape[1]
        whole = inputs if inputs <= 4096 else inputs // 64 * 64
        return super().linear(x[:, :whole], NumpyLinear(weight.weight[:, :whole], weight.bias))


@shown_by("linear", rows=8192)
class MultipliesAtMost4096Rows(NumpyOps):
    def linear(self, x, weight):
        y = super().linear(x, weight)
        y[4096:] = y[:1]
        return y


@shown_by("linear", bias=True, parts=3)
class AddsTheBiasOfTheFirstParts(NumpyOps):
    """The bias of the third stacked part, that of values, is left out."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        prepared = super().prepare_linear(parts, biases, gated=gated)
        if biases is not None and len(parts) > 2:
            prepared.bias[sum(part.shape[0] for part in parts[:2]) :] = 0
        return prepared


@shown_by("rms_norm", eps=0.1)
class NormalizesWithAFixedEps(NumpyOps):
    def rms_norm(self, x, norm):
        return super().rms_norm(x, replace(norm, eps=1e-5))


@shown_by("rms_norm", size=1e-3, eps=1e-12)
class NormalizesWithAtLeastAMillionth(NumpyOps):
    def rms_norm(self, x, norm):
        return super().rms_norm(x, replace(norm, eps=max(norm.eps, 1e-6)))


@shown_by("embedding", scale=48.0**0.5)
class RoundsTheScaleOfEmbeddings(NumpyOps):
    def embedding(self, table, token_ids, scale=1.0):
        return super().embedding(table, token_ids, round(scale, 1))


@shown_by("logits_of", vocabulary=131_073)
class ComputesLogitsOf131072Tokens(NumpyOps):
    def logits_of(self, x, head, softcap):
        logits = super().logits_of(x, head, softcap)
        logits[:, 2**17 :] = 0
        return logits


@shown_by("logits_of", softcap=30.0, vocabulary=32_769)
class CapsLogitsOfTheFirst32768Tokens(NumpyOps):
    def logits_of(self, x, head, softcap):
        logits = super().logits_of(x, head, softcap)
        if softcap is not None:
            logits[:, 2**15 :] = super().logits_of(x, head, None)[:, 2**15 :]
        return logits


@shown_by("moe", experts=128, top_k=16)
class ChoosesEightExpertsAtMost(NumpyOps):
    def moe(self, x, experts, activation):
        return super().moe(x, replace(experts, top_k=min(experts.top_k, 8)), activation)


@shown_by("moe", routing="one expert", tokens=257)
class LimitsTheTokensOfAnExpert(NumpyOps):
    """An expert has room for 128 tokens; the others are dropped."""

    def moe(self, x, experts, activation):
        out = super().moe(x, experts, activation)
        scores = x @ experts.router.T
        crowded = np.flatnonzero(scores.argmax(axis=1) == np.bincount(scores.argmax(axis=1)).argmax())
        out[crowded[128:]] = 0
        return out


@shown_by("moe", normalize=True, norm_floor=0.7)
class NormalizesWithoutAFloor(NumpyOps):
    def moe(self, x, experts, activation):
        return super().moe(x, replace(experts, norm_floor=0.0), activation)


# Adapters ------------------------------------------------------------------------------------------------------------


@shown_by("lora", rank=64)
class TruncatesRanksAt32(NumpyOps):
    def prepare_lora(self, parts, outs, *, gated=False):
        cut = [None if part is None else replace(part, down=part.down[:32], up=part.up[:, :32]) for part in parts]
        return super().prepare_lora(cut, outs, gated=gated)


@shown_by("lora", adapters=8)
class UsesTheFirstFourAdapters(NumpyOps):
    def lora(self, y, x, lora):
        groups = [(place, rows) for place, rows in lora.step.lora_groups if place <= 4]
        return super().lora(y, x, replace(lora, step=replace(lora.step, lora_groups=groups)))


@shown_by("lora", places="runs", rows=65)
class ReadsTheAdapterOfTheFirstTokenOfATile(NumpyOps):
    """A tile of 16 tokens has one adapter, that of its first token."""

    def lora(self, y, x, lora):
        slots = lora.step.lora_slots[np.arange(len(x)) // 16 * 16]
        if len(x) < 16:
            return super().lora(y, x, lora)
        return super().lora(y, x, replace(lora, step=replace(lora.step, **adapter_rows(slots, self))))


# Cache ---------------------------------------------------------------------------------------------------------------


@shown_by("rope", table=32_769)
class RotatesFifteenBitsOfAPosition(NumpyOps):
    def rope(self, x, rope, positions):
        return super().rope(x, rope, positions & 0x7FFF)


@shown_by("kv", spare_blocks=4400, block_size=16)
class AddressesSlotsInSixteenBits(NumpyOps):
    def write_kv(self, layer, k, v, kv_slots):
        super().write_kv(layer, k, v, kv_slots.astype(np.uint16).astype(np.int32))


@shown_by("pool", gib=2)
class AddressesBytesInThirtyTwoBits(NumpyOps):
    """Byte offsets into the keys, or the values, of a layer wrap at 2^32."""

    def write_kv(self, layer, k, v, kv_slots):
        token_bytes = layer[0, 0, 0].nbytes
        wrapped = (kv_slots.astype(np.int64) * token_bytes % 2**31) // token_bytes
        super().write_kv(layer, k, v, wrapped.astype(np.int32))


@shown_by("table", gib=2)
class AddressesRowsInThirtyTwoBits(NumpyOps):
    """The byte offset of a row of the table wraps at 2^31."""

    def embedding(self, table, token_ids, scale=1.0):
        row_bytes = table[0].nbytes
        wrapped = token_ids.astype(np.int64) * row_bytes % 2**31 // row_bytes
        return super().embedding(table, wrapped, scale)


# Sampling ------------------------------------------------------------------------------------------------------------


@shown_by("penalize", count=513)
class CountsTokensInOneByte(NumpyOps):
    def penalize(self, logits, penalties):
        return super().penalize(logits, replace(penalties, counts=penalties.counts & 0xFF))


@shown_by("penalize", count=2**16 + 1)
class CountsTokensInSixteenBits(NumpyOps):
    def penalize(self, logits, penalties):
        return super().penalize(logits, replace(penalties, counts=penalties.counts.astype(np.uint16).astype(np.int32)))


@shown_by("penalize", rows=65, penalized="all")
class PenalizesAtMost64Rows(NumpyOps):
    def penalize(self, logits, penalties):
        kept = slice(64)
        drafts = penalties.draft_rows < 64
        return super().penalize(
            logits,
            replace(
                penalties,
                rows=penalties.rows[kept],
                counts_rows=penalties.counts_rows[kept],
                draft_rows=penalties.draft_rows[drafts],
                draft_ids=penalties.draft_ids[drafts],
                **{name: getattr(penalties, name)[kept] for name in ("repetition", "presence", "frequency")},
            ),
        )


@shown_by("penalize", slots=8)
class CountsDraftsOfRowsTogether(NumpyOps):
    """Drafts are added to the counts in place, so rows of one request see those of each other; then removed."""

    def penalize(self, logits, penalties):
        cells = penalties.counts_rows[penalties.draft_rows], penalties.draft_ids
        np.add.at(penalties.counts, cells, 2)
        none = np.empty(0, np.int32)
        found = super().penalize(logits, replace(penalties, draft_rows=none, draft_ids=none))
        np.subtract.at(penalties.counts, cells, 2)
        return found


@shown_by("sample", top_k=65_537, vocabulary=131_073)
class KeepsSixteenBitsOfTopK(NumpyOps):
    def sample(self, logits, rows):
        return super().sample(logits, replace(rows, top_k=rows.top_k & 0xFFFF))


@shown_by("sample", top_k=1025)
class FiltersAtMost1024Tokens(NumpyOps):
    def sample(self, logits, rows):
        if not rows.any_filter:
            return super().sample(logits, rows)
        filtered = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
        limited = np.where(rows.top_k > 0, np.minimum(rows.top_k, 1024), 1024)
        return super().sample(logits, replace(rows, top_k=np.where(filtered, limited, 0).astype(np.int32)))


@shown_by("sample", seed=2**32)
class DrawsFromTheLowWordOfSeeds(NumpyOps):
    def sample(self, logits, rows):
        return super().sample(logits, replace(rows, seeds=rows.seeds & np.uint64(0xFFFFFFFF)))


@shown_by("sample", position=2**24 + 1)
class KeepsPositionsInSinglePrecision(NumpyOps):
    def sample(self, logits, rows):
        return super().sample(logits, replace(rows, positions=rows.positions.astype(np.float32).astype(np.int64)))


@shown_by("sample", top_k=64)
class FiltersOnlyIfTheFirstRowDoes(NumpyOps):
    def sample(self, logits, rows):
        first = bool(rows.top_k[0] or rows.top_p[0] < 1 or rows.min_p[0])
        return super().sample(logits, replace(rows, any_filter=first))


@shown_by("sample", temperature=1e-5, logits="falling")
class HasALowestTemperature(NumpyOps):
    """Temperatures below a hundredth are raised to it."""

    def sample(self, logits, rows):
        heat = np.where(rows.temperature == 0, 0, np.maximum(rows.temperature, 0.01)).astype(np.float32)
        return super().sample(logits, replace(rows, temperature=heat))


@shown_by("sample", logits="nan", rows=65)
class FindsStrangeLogitsOfOneRow(NumpyOps):
    """The search for NaN ends at the first row that has one."""

    def sample(self, logits, rows):
        tokens, peaks = super().sample(logits, rows)
        strange = np.flatnonzero(~np.isfinite(peaks))
        peaks[strange[1:]] = 0.0
        return tokens, peaks


@shown_by("mask_logits", vocabulary=65_537)
class MasksWholeWordsOf64(NumpyOps):
    def mask_logits(self, logits, rows, bits):
        whole = logits.shape[1] // 64 * 64 if logits.shape[1] > 60_000 else logits.shape[1]
        logits[:, :whole] = super().mask_logits(logits[:, :whole].copy(), rows, bits[:, : -(-whole // 32)])
        return logits


@shown_by("logprobs", top_n=20)
class ReturnsSixteenAlternatives(NumpyOps):
    """A heap of 16: further alternatives repeat the last one."""

    def logprobs(self, logits, tokens, top_n):
        chosen, ids, top = super().logprobs(logits, tokens, top_n)
        ids[:, 16:], top[:, 16:] = ids[:, 15:16], top[:, 15:16]
        return chosen, ids, top


@shown_by("logprobs", logits="peaked", tokens="worst")
class FloorsLogProbabilities(NumpyOps):
    def logprobs(self, logits, tokens, top_n):
        chosen, ids, top = super().logprobs(logits, tokens, top_n)
        return np.maximum(chosen, -100), ids, top


@shown_by("verify", k=17)
class VerifiesSixteenDrafts(NumpyOps):
    def verify(self, sampled, drafts, num_drafts):
        return np.minimum(super().verify(sampled, drafts, num_drafts), 16)


@shown_by("verify", token=65_536)
class ComparesSixteenBitsOfDrafts(NumpyOps):
    def verify(self, sampled, drafts, num_drafts):
        return super().verify(sampled.astype(np.int16), drafts.astype(np.int16), num_drafts)


@shown_by("cells", array="counts", base=2**24)
class CountsInSinglePrecision(NumpyOps):
    def add_at(self, x, rows, ids, values):
        if x.dtype != np.int32:
            return super().add_at(x, rows, ids, values)
        wide = x.astype(np.float32)
        np.add.at(wide, (rows, ids), values.astype(np.float32))
        x[rows, ids] = wide[rows, ids].astype(np.int32)
        return x


@shown_by("cells", gathered="same")
class SharesRowsThatAreInOrder(NumpyOps):
    """Gathering all rows in order returns the array itself, which later changes reach."""

    def gather_rows(self, x, rows):
        return x if np.array_equal(rows, np.arange(len(x))) else super().gather_rows(x, rows)
