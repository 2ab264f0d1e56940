"""Packs with one ordinary fault of a kernel each, and values of the kit's axes that show it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar
from unittest import mock

import numpy as np

from fd_core.ops.contract import HostCopies, Norm
from fd_core.ops.numpy import recurrence
from fd_core.ops.numpy.kv_8bit import dequantize_kv, quantize_kv
from fd_core.ops.numpy.ops import NumpyKVCache, NumpyLinear, NumpyOps
from fd_core.ops.weights import FP8, PackedTensor, RawTensor
from fd_core.runner.inputs.inputs import adapter_rows
from tests.testing.wrong.storing import changed

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


def places_of(step):
    """Return the place of each token in its request."""
    counts = np.diff(step.query_start)
    return np.arange(counts.sum()) + np.repeat(step.context_len - step.query_start[1:], counts)


# Layers --------------------------------------------------------------------------------------------------------------


@shown_by("layer", group=6, chunk=0, drafts=0)
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


@shown_by("layer", group=71, kv_heads=1)
class HasATileOfSixteenHeads(NumpyOps):
    """The query heads of a KV head after the first 16 repeat the last of them, in layers that are not latent."""

    def paged_attention(self, q, layer, heads, step):
        found = super().paged_attention(q, layer, heads, step)
        if not heads.latent:
            groups = found.reshape(len(q), heads.num_kv_heads, -1, heads.head_dim)
            groups[:, :, 16:] = groups[:, :, 15:16]
        return found


@shown_by("layer", head_dim=192)
class KnowsHeadsOfOneOrTwoTiles(NumpyOps):
    """Heads wider than a tile of 128, but narrower than two, are summed up over one."""

    def paged_attention(self, q, layer, heads, step):
        if 128 < heads.head_dim < 256:
            q = q.copy()
            q[..., 128:] = 0
        return super().paged_attention(q, layer, heads, step)


@shown_by("layer", window=4097)
class KeepsWindowsIn12Bits(NumpyOps):
    def paged_attention(self, q, layer, heads, step):
        window = heads.window and (heads.window & 4095 or 4096)
        return super().paged_attention(q, layer, replace(heads, window=window), step)


@shown_by("pool", gib=0)
class StartsItsMaximumAtMinus10000(NumpyOps):
    """An online softmax begins with that instead of minus infinity, so that weights of lower scores are all 0."""

    def paged_attention(self, q, layer, heads, step):
        found = super().paged_attention(q, layer, heads, step)
        lonely = np.flatnonzero(np.asarray(step.context_len) == 1)  # of others the scores are not known here
        blocks, offsets = step.block_tables[lonely, 0], np.zeros(len(lonely), int)
        k = (
            layer[0, blocks, offsets]
            .astype(np.float32)[..., : heads.head_dim]
            .repeat(heads.num_heads // heads.num_kv_heads, axis=1)
        )
        scores = (q[step.query_start[lonely]] * k).sum(axis=-1) * heads.scale
        lost = np.repeat(scores < -1e4 - 100, heads.head_dim, axis=1)
        found[step.query_start[lonely]] = np.where(lost, np.nan, found[step.query_start[lonely]])
        return found


@shown_by("layer", image_tokens=257)
class EndsImagesWithTheirTile(NumpyOps):
    """A tile of 64 queries reads keys up to that of its last query."""

    def paged_attention(self, q, layer, heads, step):
        if step.ends is not None:
            lasts = np.repeat(step.context_len, np.diff(step.query_start))
            step = replace(step, ends=np.minimum(step.ends, np.minimum(lasts, (places_of(step) // 64 + 1) * 64)))
        return super().paged_attention(q, layer, heads, step)


@shown_by("transfers", in_flight=3)
class CopiesThroughTwoBuffers(NumpyOps):
    """The third copy to the host in flight overwrites the first."""

    def fetch_later(self, arrays):
        turn, held = self.__dict__.get("turn", 0), self.__dict__.setdefault("held", {})
        self.turn = turn + 1
        copies = []
        for at, array in enumerate(arrays):
            buffer = held.setdefault((turn % 2, at, array.shape, array.dtype), np.empty_like(array))
            buffer[...] = array
            copies.append(buffer)
        return HostCopies(copies)


@shown_by("layer", chunk=1030)
class AttendsToTheFirst1024TokensOfAChunk(NumpyOps):
    def paged_attention(self, q, layer, heads, step):
        out = super().paged_attention(q, layer, heads, step)
        for start, end in zip(step.query_start, step.query_start[1:], strict=False):
            out[start + 1024 : end] = 0
        return out


@shown_by("layer", pre_norm=False, composed=False)
class NormalizesEveryInput(NumpyOps):
    def attention_inputs(self, x, norm, *rest):
        return super().attention_inputs(x, norm or Norm(np.ones(x.shape[1], np.float32), 1e-6), *rest)


@shown_by("layer", ungated="relu2")
class DoesNotSquare(NumpyOps):
    def plain_mlp_inputs(self, x, norm, up, activation, lora=None):
        return super().plain_mlp_inputs(x, norm, up, "relu" if activation == "relu2" else activation, lora)


@shown_by("latent", context=9)
class TakesTheFirstElementsAsValues(NumpyOps):
    """Latent values are the last elements of the stored vectors."""

    def paged_attention(self, q, layer, heads, step):
        if not heads.latent or layer.dtype == np.int8:
            return super().paged_attention(q, layer, heads, step)
        moved = np.concatenate([layer[..., heads.latent :], layer[..., : heads.latent]], axis=-1)
        q = np.concatenate([q[..., heads.latent :], q[..., : heads.latent]], axis=-1)
        return super().paged_attention(q, moved, heads, step)


@shown_by("recurrent", prompt=9)
class BeginsWithTheStateOfAnEarlierRequest(NumpyOps):
    def recur(self, x, recurrent, layer, step):
        with mock.patch.object(np, "zeros", lambda count, dtype: np.full(count, 0.5, dtype)):
            return super().recur(x, recurrent, layer, step)


@shown_by("recurrent", rejected=5)
class JournalsFourTokens(NumpyOps):
    """Of more drafts, the first ones are consumed before they are verified."""

    def recur(self, x, recurrent, layer, step):
        with mock.patch.object(recurrence, "MAX_JOURNAL", 4):
            return super().recur(x, recurrent, layer, step)


@shown_by("recurrent", chunk=40)
class WritesTheLastStateToAllBlocks(NumpyOps):
    """A request that continues from the end of an earlier block, as cached prefixes do, has no state there."""

    def recur(self, x, recurrent, layer, step):
        y, size = super().recur(x, recurrent, layer, step), layer.shape[2]
        for upto, count, table in zip(step.context_len, np.diff(step.query_start), step.block_tables, strict=True):
            entries = table[(upto - count) // size : (upto - 1) // size + 1]
            layer[:, entries] = layer[:, entries[-1:]]
        return y


@shown_by("recurrent", prompt=9)
class WritesTheBlockBeforeTheFirstToken(NumpyOps):
    """It may be a cached prefix that other requests share."""

    def recur(self, x, recurrent, layer, step):
        y, size = super().recur(x, recurrent, layer, step), layer.shape[2]
        for upto, count, table in zip(step.context_len, np.diff(step.query_start), step.block_tables, strict=True):
            layer[:, table[max(0, upto - count - 1) // size]] = layer[:, table[(upto - 1) // size]]
        return y


@shown_by("recurrent", chunk=8193, rule="scan")
class CarriesStatesOverATileOfTiles(NumpyOps):
    """A launch carries states over 128 tiles of 64 tokens; what follows in a long prompt stays zeros."""

    def recur(self, x, recurrent, layer, step):
        y = super().recur(x, recurrent, layer, step)
        for begin, end in zip(step.query_start, step.query_start[1:], strict=False):
            y[min(begin + 8192, end) : end] = 0
        return y


@shown_by("recurrent", prompt=33_000)
class CountsConsumedTokensIn15Bits(NumpyOps):
    def recur(self, x, recurrent, layer, step):
        def read(blocks, block):
            consumed, *others = stored(blocks, block)
            return consumed & 0x7FFF, *others

        stored = recurrence.StateBlocks.read
        with mock.patch.object(recurrence.StateBlocks, "read", read):
            return super().recur(x, recurrent, layer, step)


@shown_by("recurrent", key_dim=128)
class ReadsSixtyFourElementsOfKeys(NumpyOps):
    def recur(self, x, recurrent, layer, step):
        if recurrent.rule == "delta" and recurrent.key_dim > 64:
            x = x.copy()
            x[:, 64 : recurrent.key_dim] = 0
        return super().recur(x, recurrent, layer, step)


@shown_by("latent", context=4097)
class LosesTheLastSplitOfLatents(NumpyOps):
    """A context above 2,048 is split, and the part after the last full split is never added."""

    def paged_attention(self, q, layer, heads, step):
        if heads.latent is None or step.max_query > 1:
            return super().paged_attention(q, layer, heads, step)
        whole = np.where(step.context_len > 2048, step.context_len // 2048 * 2048, step.context_len)
        return super().paged_attention(q, layer, heads, replace(step, context_len=whole.astype(np.int32)))


class NumbersPositionsOfSomeRowsInSixteenBits(NumpyOps):
    """The kernel for steps of other numbers of tokens is right."""

    latent, of_most = False, range(0)

    def paged_attention(self, q, layer, heads, step):
        if step.max_query in self.of_most and bool(heads.latent) == self.latent:
            step = replace(step, context_len=np.minimum(step.context_len, 2**16))
        return super().paged_attention(q, layer, heads, step)


@shown_by("layer", context=131_073)
class NumbersPositionsOfChunksInSixteenBits(NumbersPositionsOfSomeRowsInSixteenBits):
    of_most = range(17, 1 << 16)


@shown_by("latent", context=131_073)
class NumbersPositionsOfLatentDraftsInSixteenBits(NumbersPositionsOfSomeRowsInSixteenBits):
    latent, of_most = True, range(2, 17)


@shown_by("latent", heads=128)
class AttendsWithSixtyFourHeadsAtMost(NumpyOps):
    def paged_attention(self, q, layer, heads, step):
        found = super().paged_attention(q, layer, heads, step)
        if heads.latent is not None:
            found.reshape(len(q), heads.num_heads, -1)[:, 64:] = 0
        return found


@shown_by("recurrent", moved=True)
class KeepsStatesInAnArrayOfTheirOwn(NumpyOps):
    """Copies of blocks have no states, which are in an array for each layer instead."""

    def recur(self, x, recurrent, layer, step):
        key = layer.__array_interface__["data"][0]
        states = self.__dict__.setdefault("states", {}).setdefault(key, layer.copy())
        return super().recur(x, recurrent, states, step)


@shown_by("latent", moved=True)
class ImportsLatentsInOrder(NumpyOps):
    """Blocks are imported in the order of their places."""

    def allocate_kv(self, shape, num_blocks):
        cache = super().allocate_kv(shape, num_blocks)
        right = cache.import_blocks
        cache.import_blocks = lambda blocks, data: right(np.sort(blocks), data)
        return cache


@shown_by("recurrent", chunk=40)
class RoundsStates(NumpyOps):
    """States are stored in bfloat16."""

    def recur(self, x, recurrent, layer, step):
        def write(blocks, of, consumed, state, journal):
            stored(blocks, of, consumed, (state.view(np.uint32) & 0xFFFF0000).view(np.float32), journal)

        stored = recurrence.StateBlocks.write
        with mock.patch.object(recurrence.StateBlocks, "write", write):
            return super().recur(x, recurrent, layer, step)


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


@shown_by("kv", kv_dtype="fp8", values="one large")
class LosesLargeFp8(NumpyOps):
    """Magnitudes beyond the largest number of FP8 become NaN."""

    def write_kv(self, layer, k, v, kv_slots):
        if layer.dtype == np.uint8:
            k, v = (np.where(np.abs(x) > 448, np.float32(np.nan), x) for x in (k, v))
        super().write_kv(layer, k, v, kv_slots)


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


@shown_by("layer", shared_blocks=20, chunk=0)
class MeasuresThePrefixOfTheFirstAndLastRow(NumpyOps):
    """The blocks that both have in common are read for all rows that begin with the same block."""

    def paged_attention(self, q, layer, heads, step):
        tables, size = step.block_tables, layer.shape[2]
        if (tables[:, 0] == tables[0, 0]).all():
            whole = int((step.context_len - np.diff(step.query_start)).min()) // size
            same = tables[0, :whole] == tables[-1, :whole]
            common = whole if same.all() else int(same.argmin())
            tables = tables.copy()
            tables[:, :common] = tables[0, :common]
        return super().paged_attention(q, layer, heads, replace(step, block_tables=tables))


@shown_by("layer", uniform=True, drafts=3)
class TakesUniformStepsForSingleTokens(NumpyOps):
    """Uniform steps are replayed with one token per row."""

    def paged_attention(self, q, layer, heads, step):
        out = super().paged_attention(q, layer, heads, step)
        if step.uniform and step.max_query > 1:
            out[1 :: step.max_query] = out[:: step.max_query]
        return out


@shown_by("layer", kv_heads=8, head_dim=128, block_size=32, kv_dtype="int8", drafts=3)
class ShowsDraftsToEachOther(NumpyOps):
    """A tuned kernel for the commonest heads has no causal mask among the tokens of a row."""

    def paged_attention(self, q, layer, heads, step):
        is_tuned = heads.num_kv_heads == 8 and heads.head_dim == 128 and layer.shape[2] == 32 and layer.dtype == np.int8
        if is_tuned and 1 < step.max_query <= 8:
            step = replace(step, ends=np.repeat(step.context_len, np.diff(step.query_start)).astype(np.int32))
        return super().paged_attention(q, layer, heads, step)


# Products ------------------------------------------------------------------------------------------------------------


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


@shown_by("rms_norm", size=1e-3, eps=1e-12)
class NormalizesWithAtLeastAMillionth(NumpyOps):
    def rms_norm(self, x, norm):
        return super().rms_norm(x, replace(norm, eps=max(norm.eps, 1e-6)))


@shown_by("embedding", scale=48.0**0.5)
class RoundsTheScaleOfEmbeddings(NumpyOps):
    def embedding(self, table, token_ids, scale=1.0, **more):
        return super().embedding(table, token_ids, round(scale, 1), **more)


@shown_by("logits_of", vocabulary=131_073)
class ComputesLogitsOf131072Tokens(NumpyOps):
    def logits_of(self, x, head, softcap):
        logits = super().logits_of(x, head, softcap)
        logits[:, 2**17 :] = 0
        return logits


@shown_by("moe", experts=257)
class KeepsExpertsInEightBits(NumpyOps):
    def moe(self, x, experts, activation):
        reachable = replace(experts, router=np.where(np.arange(len(experts.router))[:, None] < 128, experts.router, 0))
        return super().moe(x, reachable, activation)


@shown_by("moe", routing="one expert", tokens=257)
class LimitsTheTokensOfAnExpert(NumpyOps):
    """An expert has room for 128 tokens; the others are dropped."""

    def moe(self, x, experts, activation):
        out = super().moe(x, experts, activation)
        scores = x @ experts.router.T
        crowded = np.flatnonzero(scores.argmax(axis=1) == np.bincount(scores.argmax(axis=1)).argmax())
        out[crowded[128:]] = 0
        return out


# Adapters ------------------------------------------------------------------------------------------------------------


@shown_by("lora", rank=512)
class CutsRanksAt256(NumpyOps):
    """A program multiplies 256 ranks of an adapter, and an engine allows 512."""

    def prepare_lora(self, parts, outs, *, gated=False):
        cut = [part and replace(part, down=part.down[:256], up=part.up[:, :256]) for part in parts]
        return super().prepare_lora(cut, outs, gated=gated)


@shown_by("lora", places="runs", rows=65)
class ReadsTheAdapterOfTheFirstTokenOfATile(NumpyOps):
    """A tile of 16 tokens has one adapter, that of its first token."""

    def lora(self, y, x, lora):
        slots = lora.step.lora_slots[np.arange(len(x)) // 16 * 16]
        if len(x) < 16:
            return super().lora(y, x, lora)
        return super().lora(y, x, replace(lora, step=replace(lora.step, **adapter_rows(slots, self))))


@shown_by("layer", turned="before", composed=False)
class RotatesByPlace(NumpyOps):
    """The kernel knows from its row at which place a token is, but not what images before it take."""

    def attention_inputs(self, x, norm, qkv, heads, layer, step, lora=None):
        step = replace(step, positions=places_of(step))
        return super().attention_inputs(x, norm, qkv, heads, layer, step, lora)


@shown_by("latent", turned="own row", composed=False)
class RotatesLatentsByPlace(NumpyOps):
    def latent_inputs(self, x, norm, qkv, latent, heads, layer, step, lora=None):
        step = replace(step, positions=places_of(step))
        return super().latent_inputs(x, norm, qkv, latent, heads, layer, step, lora)


# Cache ---------------------------------------------------------------------------------------------------------------


@shown_by("rope", table=32_769)
class RotatesFifteenBitsOfAPosition(NumpyOps):
    def rope(self, x, rope, positions):
        return super().rope(x, rope, positions & 0x7FFF)


@shown_by("rope", tokens=4097, heads=32)
class RotatesInAGridOfSixteenBits(NumpyOps):
    """One program for each head of each token, of which there are at most 65,535."""

    def rope(self, x, rope, positions):
        out = super().rope(x, rope, positions)
        out.reshape(-1, x.shape[-1])[2**16 - 1 :] = x.reshape(-1, x.shape[-1])[2**16 - 1 :]
        return out


@shown_by("layer", decodes=2049, group=16)
class AttendsInAGridOfSixteenBits(NumpyOps):
    def paged_attention(self, q, layer, heads, step):
        out = super().paged_attention(q, layer, heads, step)
        out.reshape(-1, heads.head_dim)[2**16 - 1 :] = 0
        return out


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

    def embedding(self, table, token_ids, scale=1.0, **more):
        row_bytes = table[0].nbytes
        wrapped = token_ids.astype(np.int64) * row_bytes % 2**31 // row_bytes
        return super().embedding(table, wrapped, scale, **more)


@shown_by("many_experts", gib=2)
class AddressesExpertsInThirtyTwoBits(NumpyOps):
    """The byte offset of an expert in the stacked gates wraps at 2^31."""

    def moe(self, x, experts, activation):
        fit = 2**31 // experts.gate_up[0].weight.nbytes
        wrapped = tuple(experts.gate_up[index % fit] for index in range(len(experts.gate_up)))
        return super().moe(x, replace(experts, gate_up=wrapped), activation)


# Sampling ------------------------------------------------------------------------------------------------------------


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


@shown_by("sample", top_k=65_537, vocabulary=131_073)
class KeepsSixteenBitsOfTopK(NumpyOps):
    def sample(self, logits, rows):
        return super().sample(logits, replace(rows, top_k=rows.top_k & 0xFFFF))


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


@shown_by("mask_logits", rows=129, vocabulary=151_936)
class UnpacksMasksToAScratch(NumpyOps):
    """Of a byte for each logit, in which the rows of a large batch do not fit."""

    def mask_logits(self, logits, rows, bits):
        fit = 2**24 // logits.shape[1]
        return super().mask_logits(logits, rows[:fit], bits[:fit])


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


# Further faults ------------------------------------------------------------------------------------------------------


@shown_by("sample", top_p=0.5)
class CutsByTopPFirst(NumpyOps):
    def sample(self, logits, rows):
        if not rows.any_filter:
            return super().sample(logits, rows)
        kept = logits.copy()
        for row in range(len(logits)):
            order = np.argsort(-logits[row], kind="stable")
            heat = rows.temperature[row] or 1.0
            weights = np.exp((logits[row][order].astype(np.float64) - logits[row].max()) / heat)
            before = weights.cumsum() - weights
            cut = order[1:][before[1:] >= rows.top_p[row] * weights.sum()]
            kept[row, cut] = -np.inf
        return super().sample(kept, replace(rows, top_p=np.ones_like(rows.top_p)))


@shown_by("sample", logits="ties", temperature=0.0)
class TiesGoToTheHigherId(NumpyOps):
    def sample(self, logits, rows):
        last = logits.shape[1] - 1 - logits[:, ::-1].argmax(axis=1)
        tokens, peaks = super().sample(logits, rows)
        return np.where(rows.temperature == 0, last, tokens).astype(np.int32), peaks


@shown_by("sample", min_p=0.6)
class ForgetsMinP(NumpyOps):
    def sample(self, logits, rows):
        return super().sample(logits, replace(rows, min_p=np.zeros_like(rows.min_p)))


@shown_by("sample", temperature=0.0)
class DrawsGreedyRows(NumpyOps):
    """A greedy row in a batch with random ones is sampled, too."""

    def sample(self, logits, rows):
        heat = rows.temperature if rows.all_greedy else np.where(rows.temperature == 0, np.float32(1), rows.temperature)
        return super().sample(logits, replace(rows, temperature=heat))


@shown_by("penalize", drafts=7)
class PenalizesWithoutDrafts(NumpyOps):
    def penalize(self, logits, penalties):
        none = np.empty(0, np.int32)
        return super().penalize(logits, replace(penalties, draft_rows=none, draft_ids=none))


@shown_by("cells", repeated="one cell")
class KeepsOneOfRepeatedIndices(NumpyOps):
    def add_at(self, x, rows, ids, values):
        x[rows, ids] += values
        return x


@shown_by("mask_logits", vocabulary=33)
class IgnoresTheLastPartialWord(NumpyOps):
    """Only whole words are read: the tokens after them stay as they are."""

    def mask_logits(self, logits, rows, bits):
        whole = logits.shape[1] // 32
        return np.concatenate(
            [super().mask_logits(logits[:, : 32 * whole].copy(), rows, bits[:, :whole]), logits[:, 32 * whole :]],
            axis=1,
        )


@shown_by("mask_logits", order="random")
class MasksRowsInOrder(NumpyOps):
    """The first mask is applied to the first row, not to the row that it names."""

    def mask_logits(self, logits, rows, bits):
        return super().mask_logits(logits, np.arange(len(rows)), bits)


@shown_by("mask_logits", bits="sign")
class LosesTheSignBitOfMasks(NumpyOps):
    """A word is read as a signed number: its highest bit is never set."""

    def mask_logits(self, logits, rows, bits):
        return super().mask_logits(logits, rows, bits & 0x7FFFFFFF)


@shown_by("mask_logits", logits="nan")
class AddsMasksToLogits(NumpyOps):
    """-inf is added: a logit that is NaN stays NaN."""

    def mask_logits(self, logits, rows, bits):
        return logits + super().mask_logits(np.zeros_like(logits), rows, bits)


@shown_by("layer", decodes=65, chunk=0, drafts=0)
class ForgetsTheTailOfATile(NumpyOps):
    """Rows after the last full tile of 64 decode from the tile's first row."""

    def paged_attention(self, q, layer, heads, step):
        out = super().paged_attention(q, layer, heads, step)
        rows = len(step.context_len)
        if step.max_query == 1 and rows > 64:
            out[rows // 64 * 64 :] = out[0]
        return out


@shown_by("layer", context=4097, chunk=0, drafts=0)
class LosesTheLastSplit(NumpyOps):
    """A context above 2,048 is split, and the part after the last full split is never added."""

    def paged_attention(self, q, layer, heads, step):
        contexts = np.where(step.context_len > 2048, step.context_len // 512 * 512, step.context_len)
        if step.max_query > 1:
            return super().paged_attention(q, layer, heads, step)
        return super().paged_attention(q, layer, heads, replace(step, context_len=contexts.astype(np.int32)))


@shown_by("layer", sinks=True, context=4097)
class AddsTheSinkOfEachSplit(NumpyOps):
    """Keys are split at 2,048, and the kernel adds the sink to the sum of each of the two parts."""

    def paged_attention(self, q, layer, heads, step):
        once = super().paged_attention(q, layer, heads, step)
        if heads.sinks is None:
            return once
        twice = super().paged_attention(q, layer, replace(heads, sinks=heads.sinks + np.float32(np.log(2))), step)
        split = np.repeat(step.context_len > 2048, np.diff(step.query_start))
        return np.where(split[:, None], twice, once)


@shown_by("kv", kv_dtype="int8", spare_blocks=255)
class ReadsBlocksFromBeforeAnImport(NumpyOps):
    """Blocks in 8 bits are dequantized once, and again after `write_kv`, but not after `import_blocks`."""

    def allocate_kv(self, shape, num_blocks):
        cache = super().allocate_kv(shape, num_blocks)
        self.plain = {index: [cache.layer(index), {}] for index in range(shape.num_layers)}
        return changed(cache, layer=lambda cache, index, kept=self.plain: kept[index])

    def write_kv(self, layer, k, v, kv_slots):
        data, plain = layer
        for block in (kv_slots // data.shape[2]).tolist():
            plain.pop(block, None)
        super().write_kv(data, k, v, kv_slots)

    def paged_attention(self, q, layer, heads, step):
        data, plain = layer
        for block in step.block_tables.ravel().tolist():
            plain.setdefault(block, dequantize_kv(data[:, block]))
        held = np.stack([plain[block] for block in step.block_tables.ravel().tolist()], axis=1)
        tables = np.arange(held.shape[1], dtype=np.int32).reshape(step.block_tables.shape)
        return super().paged_attention(q, held, heads, replace(step, block_tables=tables))


@shown_by("kv", kv_heads=32)
class WritesSixteenHeadsAtMost(NumpyOps):
    """The kernel that writes the cache has one warp per head, and 16 warps."""

    def write_kv(self, layer, k, v, kv_slots):
        kept = layer[:, :, :, 16:].copy()
        super().write_kv(layer, k, v, kv_slots)
        layer[:, :, :, 16:] = kept


@shown_by("kv", tokens=33)
class PadsIntoBlockZero(NumpyOps):
    """The rows that pad a tile write their zeros to the first slot of the cache."""

    def write_kv(self, layer, k, v, kv_slots):
        super().write_kv(layer, k, v, kv_slots)
        if len(kv_slots) > 32 and len(kv_slots) % 32 and not (kv_slots < layer.shape[2]).any():
            layer[:, 0, 0] = 0


@shown_by("kv", spare_blocks=4400, block_size=16)
class CountsCacheSlotsInSixteenBits(NumpyOps):
    def write_kv(self, layer, k, v, kv_slots):
        super().write_kv(layer, k, v, kv_slots.astype(np.uint16).astype(np.int32))


@shown_by("embedding", centred=True)
class KeepsTheMeanOfEmbeddings(NumpyOps):
    def embedding(self, table, token_ids, scale=1.0, **more):
        return super().embedding(table, token_ids, scale)


@shown_by("embedding", vocabulary=131_073)
class LooksUpTokensInSixteenBits(NumpyOps):
    def embedding(self, table, token_ids, scale=1.0, **more):
        return super().embedding(table, token_ids.astype(np.uint16).astype(np.int32), scale, **more)


@shown_by("sample", vocabulary=1025)
class ReadsWholeTilesOfTheVocabulary(NumpyOps):
    """The largest logit is searched in full tiles of 1,024, so never after the last one."""

    def sample(self, logits, rows):
        whole = logits.shape[1] // 1024 * 1024
        return super().sample(logits[:, : whole or None], rows)


@shown_by("sample", vocabulary=131_073)
class SumsWeightsInSinglePrecision(NumpyOps):
    """Cumulative weights in float32, which hold 24 bits: exact for small vocabularies only."""

    def sample(self, logits, rows):
        if rows.all_greedy or (rows.any_filter and logits.shape[1] < 60_000):
            return super().sample(logits, rows)
        heat = np.where(rows.temperature == 0, 1.0, rows.temperature)[:, None]
        peaks = logits.max(axis=1, keepdims=True)
        rounded = np.float32(2**32) * np.exp((logits - peaks) / heat).astype(np.float32)
        single = rounded.cumsum(axis=1, dtype=np.float32)
        steps = np.diff(single.astype(np.float64), axis=1, prepend=0.0)
        with np.errstate(divide="ignore"):
            again = (np.log(steps / 2**32) * heat).astype(np.float32) + peaks
        again[rows.temperature == 0] = logits[rows.temperature == 0]
        tokens, _ = super().sample(again, rows)
        return tokens, peaks[:, 0]


@shown_by("logprobs", vocabulary=131_073)
class RanksInSixteenBits(NumpyOps):
    def ranks(self, logits, tokens):
        return super().ranks(logits, tokens).astype(np.uint16).astype(np.int32)


@shown_by("penalize", rows=65)
class LeavesDraftsInTheCounts(NumpyOps):
    """Counts of a large batch are not copied before drafts are added to them."""

    def penalize(self, logits, penalties):
        result = super().penalize(logits, penalties)
        if len(penalties.rows) > 32:
            indices = penalties.counts_rows[penalties.draft_rows], penalties.draft_ids
            np.add.at(penalties.counts, indices, 2)
        return result


# Values that random data hardly has -----------------------------------------------------------------------------------


def in_bfloat16(values):
    """Return float32 numbers rounded to bfloat16, half up."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) + np.uint32(0x8000)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


@shown_by("linear", source="F32", data="alike", packed=None)
class KeepsWeightsInBfloat16(NumpyOps):
    """Although its dtype is float32."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        right = super().prepare_linear(parts, biases, gated=gated)
        return NumpyLinear(in_bfloat16(right.weight), right.bias)


@shown_by("embedding", source="F32")
class KeepsTablesInBfloat16(NumpyOps):
    table_formats = frozenset()

    def prepare_embedding(self, weight):
        return in_bfloat16(weight.to_float32())


@shown_by("moe", offset=0)
class RoutesInBfloat16(NumpyOps):
    def moe(self, x, experts, activation):
        return super().moe(x, replace(experts, router=in_bfloat16(experts.router)), activation)


@shown_by("linear", data="large", gated="silu")
class ActivatesWithExponentials(NumpyOps):
    """A sigmoid as e / (1 + e), which is NaN for a large gate."""

    def gate(self, gate_up, activation):
        if activation != "silu":
            return super().gate(gate_up, activation)
        gate, up = np.split(gate_up, 2, axis=-1)
        with np.errstate(all="ignore"):
            return gate * (np.exp(gate) / (1 + np.exp(gate))) * up


@shown_by("logits_of", softcap=1.5, size=256.0)
class CapsWithExponentials(NumpyOps):
    def logits_of(self, x, head, softcap):
        logits = super().logits_of(x, head, None)
        if softcap is None:
            return logits
        with np.errstate(all="ignore"):
            squared = np.exp(2 * logits / np.float32(softcap))
            return (squared - 1) / (squared + 1) * np.float32(softcap)


@shown_by("moe", offset=128)
class RoutesWithoutThePeak(NumpyOps):
    """A softmax of large scores overflows."""

    def moe(self, x, experts, activation):
        output = super().moe(x, experts, activation)
        output[(x @ experts.router.T).max(axis=1) > 88] = np.nan
        return output


@shown_by("moe", wild=True)
class DispatchesTokensByProducts(NumpyOps):
    """Results return to their tokens by a product with zeros and ones, through which a NaN reaches all of them."""

    def moe(self, x, experts, activation):
        output = super().moe(x, experts, activation)
        return np.eye(len(x), dtype=np.float32) @ output


@shown_by("linear", group=128)
class AssumesTheUsualGroup(NumpyOps):
    """Scales of larger groups are read with the stride of the usual ones."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        return super().prepare_linear([self.usual(part) for part in parts], biases, gated=gated)

    def usual(self, part):
        group = {"gptq": 64, "awq": 64, "int4": 32}.get(getattr(part, "format", ""), 0)
        if not group or part.group == group:
            return part
        read = np.minimum(np.arange(part.shape[1] // group), part.scales.shape[1] - 1)
        minima = None if part.minima is None else part.minima[:, read]
        return replace(part, scales=part.scales[:, read], minima=minima)


@shown_by("linear", packed="Q4_0")
class LosesTheSignOfScales(NumpyOps):
    """GGUF files have negative scales where the largest value of a group is positive."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        parts = [replace(part, scales=abs(part.scales)) if isinstance(part, PackedTensor) else part for part in parts]
        return super().prepare_linear(parts, biases, gated=gated)


@shown_by("linear", packed="Q4_1")
class SubtractsTheSizeOfMinima(NumpyOps):
    def prepare_linear(self, parts, biases=None, *, gated=False):
        parts = [
            replace(part, minima=-abs(part.minima)) if getattr(part, "minima", None) is not None else part
            for part in parts
        ]
        return super().prepare_linear(parts, biases, gated=gated)


@shown_by("sample", logits="nan")
class MissesNaNWithASign(NumpyOps):
    """Logits are ordered by their bits, where such a NaN is the smallest."""

    def sample(self, logits, rows):
        smallest = np.isnan(logits) & (logits.view(np.int32) < 0)
        return super().sample(np.where(smallest, np.float32(-np.inf), logits), rows)


class _Placed(list):
    other = None
    last = ()


@shown_by("lora", placed="in turns", adapters=2)
class SwapsBuffersOfAdapters(NumpyOps):
    """Two buffers take turns; slots that changed since the last call are copied to one of them only."""

    def place_loras(self, deltas, inputs, outs, before=None):
        if super().place_loras(deltas, inputs, outs, before) is None:
            return None
        if not isinstance(before, _Placed) or before.other is None:
            placed = _Placed(deltas)
        else:
            same = [new is old for new, old in zip(deltas, before.last, strict=True)]
            placed = _Placed(old if keep else new for new, old, keep in zip(deltas, before.other, same, strict=True))
        placed.other, placed.last = list(before or ()) or None, list(deltas)
        return placed


@shown_by("moe", tokens=8193)
class IndexesChoicesInSixteenBits(NumpyOps):
    """Pairs of tokens and choices, grouped by expert, have indices of 16 bits."""

    def moe(self, x, experts, activation):
        output = super().moe(x, experts, activation)
        lost = np.arange(len(x)) * experts.top_k >= 2**16
        if lost.any():
            output[lost] = self.add_shared(np.zeros_like(x[lost]), x[lost], experts, activation)
        return output


class _LateCopies(HostCopies):
    def wait(self):
        return [np.array(array) for array in self._arrays]


@shown_by("cells", repeated="one cell")
class CopiesWhenAsked(NumpyOps):
    """A queued copy is taken only when it is read."""

    on_host, queues = False, True

    def fetch_later(self, arrays):
        return _LateCopies(list(arrays))


@shown_by("linear", bias=True, source="BF16")
class ReadsBiasesAsFloat16(NumpyOps):
    """Biases of bfloat16 checkpoints are taken for float16."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        if biases is not None:
            biases = [RawTensor("F16", each.data.view(np.float16)) if each.dtype == "BF16" else each for each in biases]
        return super().prepare_linear(parts, biases, gated=gated)


@shown_by("embedding", packed_table="Q8_0", stored="usual")
class LooksUpWithTheFirstScaleOfARow(NumpyOps):
    def embedding(self, table, token_ids, scale=1.0, **more):
        if isinstance(table, PackedTensor) and table.scales.shape[1] > 1:
            table = replace(table, scales=np.broadcast_to(table.scales[:, :1], table.scales.shape))
        return super().embedding(table, token_ids, scale, **more)


@shown_by("logits_of", tied=True, packed="int8", table="Q8_0")
class SharesAPackedTableOfAnotherFormat(NumpyOps):
    def tied_head(self, embedding, weight, bias=None):
        return super().tied_head(embedding, embedding if isinstance(embedding, PackedTensor) else weight, bias)


@shown_by("logits_of", tied="with a bias")
class LeavesOutTheBiasOfATiedHead(NumpyOps):
    def tied_head(self, embedding, weight, bias=None):
        return super().tied_head(embedding, weight)


@shown_by("logits_of", wild=True)
class ScalesStatesTogether(NumpyOps):
    """States are quantized with one scale for the batch, through which a NaN reaches all of them."""

    def logits_of(self, x, head, softcap):
        largest = np.abs(x).max()
        return super().logits_of(x / largest * largest, head, softcap)


@shown_by("rms_norm", odd="nan")
class NormalizesTheBatchByItsLargest(NumpyOps):
    """Rows are divided by the largest element of all of them before they are squared."""

    def rms_norm(self, x, norm):
        largest = np.abs(x).max(initial=1.0)
        return super().rms_norm(x / largest, replace(norm, eps=norm.eps / largest**2))


class _SharingCache(NumpyKVCache):
    def export_blocks(self, blocks):
        if len(blocks) and (np.diff(blocks) == 1).all():
            return self._data.transpose(2, 0, 1, 3, 4, 5)[blocks[0] : blocks[-1] + 1]
        return super().export_blocks(blocks)


@shown_by("kv", kv_dtype="auto")
class ExportsConsecutiveBlocksAsView(NumpyOps):
    """Exported blocks change with the cache while they are sent or stored."""

    def allocate_kv(self, shape, num_blocks):
        return _SharingCache(shape, num_blocks)


@shown_by("linear", packed=FP8)
class ReadsFloat8AsInt8(NumpyOps):
    def prepare_linear(self, parts, biases=None, *, gated=False):
        fp8 = [part for part in parts if isinstance(part, PackedTensor) and part.format == FP8]
        parts = [replace(part, format="int8") for part in fp8] if fp8 else parts
        return super().prepare_linear(parts, biases, gated=gated)


@shown_by("lora", wild=True)
class WeighsAdaptersInsteadOfSelecting(NumpyOps):
    """Right as long as every product is finite."""

    def lora(self, y, x, lora):
        for index, delta in enumerate(lora.deltas, 1):
            if delta is not None:
                mine = (lora.step.lora_slots == index)[:, None]
                y = y + self.linear(self.linear(x, delta[0]), delta[1]) * mine.astype(np.float32)
        return y


# Reuse ---------------------------------------------------------------------------------------------------------------


@shown_by("linear", again=True)
class KeepsWeightsByShape(NumpyOps):
    """A cache of prepared weights whose key is the shape: a second model of the same sizes gets the first one's."""

    kept: ClassVar = {}

    def prepare_linear(self, parts, biases=None, *, gated=False):
        made = super().prepare_linear(parts, biases, gated=gated)
        return self.kept.setdefault((getattr(made.weight, "shape", None), gated, biases is None), made)


@shown_by("rms_norm", again=True)
class ReturnsOneBufferOfAShape(NumpyOps):
    """The output of each call is the same memory."""

    def __init__(self):
        super().__init__()
        self.outputs = {}

    def rms_norm(self, x, norm):
        found = super().rms_norm(x, norm)
        output = self.outputs.setdefault(found.shape, np.empty_like(found))
        output[...] = found
        return output


@shown_by("logprobs", again=True)
class NormalizesLogitsInPlace(NumpyOps):
    """Log-probabilities overwrite the logits, which ranks and a sampler read."""

    def ranks(self, logits, tokens):
        found = super().ranks(logits, tokens)
        logits -= np.float32(1.0)
        return found


@shown_by("sample", again=True)
class AdvancesItsRandomNumbers(NumpyOps):
    """A generator with a state instead of a function of seed and position."""

    calls = 0

    def sample(self, logits, rows):
        self.calls += 1
        return super().sample(logits, replace(rows, positions=rows.positions + (self.calls > 3)))


@shown_by("layer", again=True, chunk=0)
class PlansByTheNumberOfRows(NumpyOps):
    """A plan of a step is kept for the next one with as many rows and blocks."""

    def __init__(self):
        super().__init__()
        self.plans = {}

    def paged_attention(self, q, layer, heads, step):
        tables = self.plans.setdefault((len(q), step.block_tables.shape, step.max_context), step.block_tables)
        return super().paged_attention(q, layer, heads, replace(step, block_tables=tables))


# Forms of weights ----------------------------------------------------------------------------------------------------


@shown_by("linear", stored="sliced", source="BF16", packed=None)
class ReadsHalvesThroughAPointer(NumpyOps):
    """16-bit weights are read row after row; a shard of columns is not contiguous."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        def read(part):
            if not isinstance(part, RawTensor) or part.data.itemsize != 2:
                return part
            out, ins = part.shape
            return RawTensor(part.dtype, np.lib.stride_tricks.as_strided(part.data, (out, ins), (2 * ins, 2)).copy())

        return super().prepare_linear([read(part) for part in parts], biases, gated=gated)


@shown_by("moe", source="F16", packed=None)
class TakesFloat16ExpertsForBfloat16(NumpyOps):
    """Experts are stacked by bits: all of 2 bytes are read as bfloat16."""

    def prepare_experts(self, parts, biases=None, *, gated):
        def read(part):
            is_half = isinstance(part, RawTensor) and part.data.itemsize == 2
            return RawTensor("BF16", part.data.view(np.uint16)) if is_half else part

        return super().prepare_experts([[read(part) for part in expert] for expert in parts], biases, gated=gated)


@shown_by("moe", packed_down="Q6_K")
class ReadsDownInTheFormatOfUp(NumpyOps):
    """The kernel of experts is chosen by gate and up; it reads scales of `down` with their group, and their minima."""

    def __init__(self):
        super().__init__()
        self.up = None

    def prepare_experts(self, parts, biases=None, *, gated):
        if gated:
            self.up = parts[0][0]
        elif isinstance(self.up, PackedTensor) and isinstance(parts[0][0], PackedTensor):
            parts = [[self.read(part) for part in each] for each in parts]
        return super().prepare_experts(parts, biases, gated=gated)

    def read(self, part):
        shape = part.shape[0], part.shape[1] // min(self.up.group, part.shape[1])
        lost = self.up.minima is None or part.minima is None
        return replace(
            part, scales=np.resize(part.scales, shape), minima=None if lost else np.resize(part.minima, shape)
        )


class _Packed(NumpyLinear):
    pass


@shown_by("logits_of", rows=0, packed="int8")
class LaunchesNoEmptyGrid(NumpyOps):
    """The kernel of packed weights has a block for each row, and a grid of none is an error: a step that samples no
    row, such as a chunk of a prompt, has no rows of logits."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        made = super().prepare_linear(parts, biases, gated=gated)
        return _Packed(made.weight, made.bias) if isinstance(parts[0], PackedTensor) else made

    def linear(self, x, weight):
        if isinstance(weight, _Packed) and not len(x):
            raise RuntimeError("invalid configuration argument")
        return super().linear(x, weight)


@shown_by("sample", spread="all rows", temperature=0.0, logits="nan")
class IgnoresNaNInGreedyPeaks(NumpyOps):
    """The argmax of greedy batches uses the machine's maximum, which prefers a number to NaN."""

    def sample(self, logits, rows):
        if not rows.all_greedy:
            return super().sample(logits, rows)
        return super().sample(np.where(np.isnan(logits), np.float32(-np.inf), logits), rows)


@shown_by("layer", window=7, block_size=1)
class MultipliesTheKeyBeforeTheWindowByZero(NumpyOps):
    def paged_attention(self, q, layer, heads, step):
        output = super().paged_attention(q, layer, heads, step)
        held = dequantize_kv(layer)
        for row, context in enumerate(step.context_len.tolist()):
            tokens = slice(step.query_start[row], step.query_start[row + 1])
            before = context - (tokens.stop - tokens.start) - (heads.window or context)
            if before >= 0:
                block = step.block_tables[row, before // held.shape[2]]
                output[tokens] += np.float32(0) * held[0, block, before % held.shape[2]].sum()
        return output


@shown_by("moe", expert_biases=True)
class DropsBiasesOfExperts(NumpyOps):
    """The grouped product has no bias."""

    def prepare_experts(self, parts, biases=None, *, gated):
        return super().prepare_experts(parts, gated=gated)


@shown_by("moe", clamped=True)
class ClampsNothing(NumpyOps):
    """Gate and up of gpt-oss are not limited."""

    def gate(self, gate_up, activation):
        if activation != "clamped_swiglu":
            return super().gate(gate_up, activation)
        gate, up = np.split(gate_up, 2, axis=-1)
        return self.activate(gate, "quick_gelu") * (up + 1)


class _HandedOver(HostCopies):
    def wait(self):
        arrays, self._arrays = self._arrays, []
        return arrays


@shown_by("transfers", by="from_host")
class HandsItsCopiesOver(NumpyOps):
    """Buffers of a copy return to their pool with the first wait; an adapter that is loaded meanwhile waits, too."""

    def fetch_later(self, arrays):
        return _HandedOver(list(arrays))


@shown_by("linear", packed=None, second="Q8_0")
class PreparesPartsInTheFormatOfTheFirst(NumpyOps):
    """Stacked parts are raw if the first one is: the values of a packed part are taken for weights."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        if isinstance(parts[0], RawTensor):
            parts = [RawTensor("F32", p.values.astype(np.float32)) if isinstance(p, PackedTensor) else p for p in parts]
        return super().prepare_linear(parts, biases, gated=gated)


@shown_by("gate", size=1.0)
class ApproximatesGates(NumpyOps):
    def gate_heads(self, x, gate):
        return x * np.clip(0.5 + gate / 4, 0, 1)


@shown_by("gate", fused=True)
class GatesWithTheInputs(NumpyOps):
    """Gates are computed of inputs that are not normalized."""

    def gated_attention(self, a, x, norm, gate):
        return super().gated_attention(a, x, None, gate)


@shown_by("activate", activation="relu2")
class ForgetsToSquare(NumpyOps):
    def activate(self, x, activation):
        return super().activate(x, "relu" if activation == "relu2" else activation)


@shown_by("activate", odd="nan")
class ActivatesNaNAsZero(NumpyOps):
    def activate(self, x, activation):
        return np.nan_to_num(super().activate(x, activation))


@shown_by("lora", adapters=33)
class AppliesSixteenAdaptersAtMost(NumpyOps):
    def lora(self, y, x, lora):
        groups = tuple(group for group in lora.step.lora_groups if group[0] <= 16)
        return super().lora(y, x, replace(lora, step=replace(lora.step, lora_groups=groups)))


@shown_by("sample", vocabulary=262_208, temperature=0.0)
class SearchesAQuarterMillionTokens(NumpyOps):
    """The grid of the greedy search has 256 blocks of 1,024 tokens."""

    def sample(self, logits, rows):
        return super().sample(logits[:, : 2**18] if rows.all_greedy else logits, rows)


@shown_by("linear", inputs=28_672)
class SumsSixteenThousandInputs(NumpyOps):
    """A row of activations is kept in 64 KiB; inputs after it are left out."""

    def linear(self, x, weight):
        return super().linear(x[..., : 2**14], replace(weight, weight=weight.weight[:, : 2**14]))


@shown_by("layer", spare_blocks=40_000, block_size=1)
class KeepsBlocksInSixteenBits(NumpyOps):
    def paged_attention(self, q, layer, heads, step):
        return super().paged_attention(q, layer, heads, replace(step, block_tables=step.block_tables.astype(np.int16)))


@shown_by("embedding", added=True)
class AddsPositionsFromOne(NumpyOps):
    """The first row of a table of positions is taken for padding."""

    def add_positions(self, x, table, positions):
        return x + table[np.minimum(positions + 1, len(table) - 1)]


@shown_by("transfers", by="upload")
class UploadsIntoOneBuffer(NumpyOps):
    """The arrays of a step are views of one buffer, which the next upload overwrites."""

    def upload(self, arrays):
        sizes = [-(-array.nbytes // 8) * 8 for array in arrays]
        if not hasattr(self, "buffer") or len(self.buffer) < sum(sizes):
            self.buffer = np.empty(sum(sizes), np.uint8)
        begins = np.cumsum([0, *sizes]).tolist()
        views = [
            self.buffer[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
            for begin, array in zip(begins, arrays, strict=False)
        ]
        for view, array in zip(views, arrays, strict=True):
            view[...] = array
        return views


class _LateImports(NumpyKVCache):
    waiting = ()

    def import_blocks(self, blocks, data):
        self.export_blocks(blocks[:0])
        self.waiting = blocks, data

    def export_blocks(self, blocks):
        now, self.waiting = self.waiting, ()
        if now:
            super().import_blocks(*now)
        return super().export_blocks(blocks)


@shown_by("kv", layers=2)
class ImportsWhenAsked(NumpyOps):
    """Blocks are imported from the caller's memory when they are read, after the call has returned."""

    def allocate_kv(self, shape, num_blocks):
        return _LateImports(shape, num_blocks)


@shown_by("linear", data="zeros")
class DividesInputsByTheirLargest(NumpyOps):
    """Activations are scaled to their largest, which is 0 for a token that a relu leaves empty."""

    def linear(self, x, weight):
        with np.errstate(invalid="ignore"):
            largest = np.abs(x).max(axis=-1, keepdims=True, initial=0.0)
            return super().linear(x / largest, replace(weight, bias=None)) * largest + (
                0 if weight.bias is None else weight.bias
            )


@shown_by("linear", packed="int8")
class DividesByScales(NumpyOps):
    """Packed weights are packed again by rows, of which those of a pruned channel are all 0."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        right = super().prepare_linear(parts, biases, gated=gated)
        if not any(isinstance(part, PackedTensor) for part in parts):
            return right
        with np.errstate(invalid="ignore"):
            largest = np.abs(right.weight).max(axis=1, keepdims=True)
            return replace(right, weight=right.weight / largest * largest)


@shown_by("elements", operation="gate")
class LaunchesTheGateOnAClampedGrid(NumpyOps):
    """One thread per element, 256 in a block, and at most 65,535 blocks: the rest stays zeros."""

    def gate(self, gate_up, activation):
        found = super().gate(gate_up, activation)
        found.reshape(-1)[65_535 * 256 :] = 0
        return found


@shown_by("elements", operation="norm")
class NumbersElementsInFloat32(NumpyOps):
    """The number of an element is rounded above 2^24: of two next to each other one is never written."""

    def rms_norm(self, x, norm):
        found = super().rms_norm(x, norm).copy()
        found.reshape(-1)[2**24 + 1 :: 2] = 0
        return found


@shown_by("linear", again=True, rows=1)
class KeepsProductsOfSingleTokens(NumpyOps):
    """A decode of the same token gets the array that the last one may have written into."""

    def linear(self, x, weight):
        found = super().linear(x, weight)
        if len(x) > 1:
            return found
        self.products = getattr(self, "products", {})
        return self.products.setdefault((weight, found.shape, found.tobytes()), found)


@shown_by("embedding", again=True, rows=1)
class EmbedsATokenByAViewOfTheTable(NumpyOps):
    """Positions that are added to the embedding change the table."""

    def embedding(self, table, token_ids, scale=1.0, *, centred=False):
        found = super().embedding(table, token_ids, scale, centred=centred)
        if len(found) == 1 and isinstance(table, np.ndarray):
            view = table[int(token_ids[0]) :][:1]
            return view if np.array_equal(view, found) else found
        return found


@shown_by("cells", array="logits", cells=7)
class AddsBiasesInHalfPrecision(NumpyOps):
    def add_at(self, x, rows, ids, values):
        if values.dtype == np.float32:
            values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        return super().add_at(x, rows, ids, values)


@shown_by("transfers", by="states_from_host")
class UploadsStatesInHalfPrecision(NumpyOps):
    def states_from_host(self, states):
        return (states.view(np.uint32) & 0xFFFF0000).view(np.float32)


class _NeverReady(HostCopies):
    def ready(self):
        return False


@shown_by("transfers", in_flight=1)
class IsNeverReady(NumpyOps):
    """Copies end when they are waited for, but an engine waits only for those that are ready."""

    on_host = False

    def fetch_later(self, arrays):
        return _NeverReady([*arrays])


def dense(blocks):
    """Return a slice of blocks that seem to be adjacent and in order, by the first and the last of them."""
    if len(blocks) and blocks[-1] - blocks[0] + 1 == len(blocks):
        return slice(int(blocks[0]), int(blocks[-1]) + 1)
    return blocks


@shown_by("kv", tokens=33)
class CopiesFromTheFirstToTheLast(NumpyOps):
    def allocate_kv(self, shape, num_blocks):
        cache = super().allocate_kv(shape, num_blocks)
        get, numbers = cache.export_blocks, np.arange(num_blocks)
        return changed(cache, export_blocks=lambda self, blocks: get(numbers[dense(blocks)]))


@shown_by("kv", tokens=33, order="ascending")
class WritesFromTheFirstToTheLast(NumpyOps):
    def allocate_kv(self, shape, num_blocks):
        cache = super().allocate_kv(shape, num_blocks)
        put, numbers = cache.import_blocks, np.arange(num_blocks)
        return changed(cache, import_blocks=lambda self, blocks, data: put(numbers[dense(blocks)], data))
