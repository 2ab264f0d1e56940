"""Kernels over rows of logits, except sampling: penalties, masks, log-probabilities, ranks and the token matrix.

`fd_core.ops.contract.Ops` defines them. Each is one launch, and none sorts a vocabulary.

Several programs work on a row. Each writes its result to a workspace, and the last one to arrive combines them, which
saves a launch. This is correct in the memory model of PTX: the barrier orders the writes of all threads of a program
before its atomic addition, and the addition, with release and acquire semantics at device scope, makes them visible to
later additions (causality order is transitive: PTX ISA, "Memory Consistency Model"). The last one bypasses the caches
of its multiprocessor, and resets the counter to 0 for the next launch on the stream.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fd_gpu_cuda.kernels.entry import kernel


@triton.jit
def is_last(counters_at, row, programs):
    """Return True in the last program of a row, which may then read the writes of all others."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_at + row, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    last = arrived == programs - 1
    if last:
        tl.store(counters_at + row, 0)
    return last


@triton.jit
def weight_of(logit, peak, temperature):
    """Return rint(2^32 * exp((logit - peak) / temperature)) in float64, of float64 arguments."""
    weight = tl.exp((logit - peak) / temperature) * 4294967296.0
    # Numbers from 2^52 on are integers, so adding 2^52 rounds to nearest even.
    return (weight + 4503599627370496.0) - 4503599627370496.0


@triton.jit
def key_of(logit):
    """Return int64 keys in the order of float32 logits, equal for -0.0 and 0.0."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def logit_of(key):
    """Return the float32 logits of int64 keys."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@kernel(do_not_specialize=["drafts"])
def penalize(
    logits_at, stride, rows_at, counts_at, counts_stride, counts_rows_at, draft_rows_at, draft_ids_at,
    repetition_at, presence_at, frequency_at,
    vocabulary, drafts,
    tile: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Apply the penalties of each row to its tokens. Grid: penalized rows, tiles.

    Launched without fused multiply-add: the contract rounds each operation.
    """
    index = tl.program_id(0)
    token = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = token < vocabulary
    counts_row = tl.load(counts_rows_at + index).to(tl.int64)
    counts = tl.load(counts_at + counts_row * counts_stride + token, mask=inside, other=0)
    # `draft_rows` is sorted, so this row's drafts are between the counts of smaller rows and of rows up to it.
    first = 0
    last = 0
    for begin in range(0, drafts, chunk):
        place = begin + tl.arange(0, chunk)
        row = tl.load(draft_rows_at + place, mask=place < drafts, other=2147483647)
        first += tl.sum((row < index).to(tl.int32), 0)
        last += tl.sum((row <= index).to(tl.int32), 0)
    for place in range(first, last):
        counts += tl.where(token == tl.load(draft_ids_at + place), 2, 0)
    seen = inside & (counts != 0)
    if tl.max(seen.to(tl.int32), 0) > 0:
        cells = tl.load(rows_at + index).to(tl.int64) * stride + token
        repetition = tl.load(repetition_at + index)
        presence = tl.load(presence_at + index).to(tl.float64)
        frequency = tl.load(frequency_at + index).to(tl.float64)
        logit = tl.load(logits_at + cells, mask=seen, other=0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, tl.zeros((tile,), tl.float32) + repetition), logit * repetition)
        generated = (counts >> 1).to(tl.float64)
        added = tl.where(generated > 0, presence, 0.0) + frequency * generated
        tl.store(logits_at + cells, logit - added.to(tl.float32), mask=seen)


@kernel
def mask(logits_at, stride, rows_at, bits_at, words, vocabulary, tile: tl.constexpr):
    """Set the logits of tokens whose bit is 0 to -inf. Grid: masked rows, tiles."""
    index = tl.program_id(0)
    row = tl.load(rows_at + index).to(tl.int64)
    token = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = token < vocabulary
    word = tl.load(bits_at + index.to(tl.int64) * words + token // 32, mask=inside, other=0)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits_at + row * stride + token, -float("inf"), mask=forbidden)


@kernel(do_not_specialize=["count"])
def add(x_at, stride, rows_at, ids_at, values_at, count, tile: tl.constexpr, chunk: tl.constexpr):
    """Add values to single cells in the given order. Grid: tiles of the values.

    The program of a cell's first value adds all values of that cell sequentially, so float32 sums are deterministic and
    equal to those of a loop over the values. No other program writes that cell.
    """
    own = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = own < count
    cell = tl.load(rows_at + own, mask=inside, other=0).to(tl.int64) * stride
    cell += tl.load(ids_at + own, mask=inside, other=0)
    total = tl.load(x_at + cell, mask=inside, other=0)
    repeats = tl.zeros((tile,), tl.int32)
    for begin in range(0, count, chunk):
        place = begin + tl.arange(0, chunk)
        known = place < count
        other = tl.load(rows_at + place, mask=known, other=0).to(tl.int64) * stride
        other += tl.load(ids_at + place, mask=known, other=0)
        value = tl.load(values_at + place, mask=known, other=0)
        same = (cell[:, None] == other[None, :]) & known[None, :] & inside[:, None]
        repeats += tl.sum((same & (place[None, :] < own[:, None])).to(tl.int32), 1)
        matches = tl.sum(same.to(tl.int32), 1)
        if tl.max(matches, 0) == 1:
            only = tl.sum(tl.where(same, value[None, :], 0), 1).to(total.dtype)
            total = tl.where(matches > 0, total + only, total)
        elif tl.max(matches, 0) > 1:
            for step in range(chunk):
                if begin + step < count:
                    one = tl.load(rows_at + begin + step).to(tl.int64) * stride + tl.load(ids_at + begin + step)
                    total = tl.where(cell == one, total + tl.load(values_at + begin + step), total)
    tl.store(x_at + cell, total, mask=inside & (repeats == 0))


_LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _id_of(key):
    """Return the id in a key, or an arbitrary valid id for an empty key."""
    return tl.where(key == _LOWEST, 0, (4294967295 - (key & 4294967295))).to(tl.int32)


@kernel(do_not_specialize=["wanted"])
def score(
    logits_at, stride, tokens_at, part_peaks_at, part_sums_at, part_keys_at, counters_at,
    chosen_at, top_ids_at, top_at,
    vocabulary, wanted,
    tile: tl.constexpr, most_tiles: tl.constexpr, most: tl.constexpr, listed: tl.constexpr,
):  # fmt: skip
    """Score each row's token and its `wanted` most likely ones, at most `most`. Grid: rows, tiles.

    `part_keys_at` has `most` keys per tile, of which `listed` are of the vocabulary.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tiles = tl.num_programs(1)
    logits_at += row * stride
    parts_at = row * most_tiles
    token = part * tile + tl.arange(0, tile)
    logit = tl.load(logits_at + token, mask=token < vocabulary, other=-float("inf"))
    peak = tl.max(logit, 0)
    floor = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(part_peaks_at + parts_at + part, peak)
    tl.store(part_sums_at + parts_at + part, tl.sum(tl.exp(logit - floor), 0))
    keys = (key_of(logit) << 32) + (4294967295 - token.to(tl.int64))
    keys = tl.where(token < vocabulary, keys, _LOWEST)
    for place in range(wanted):
        best = tl.max(keys, 0)
        tl.store(part_keys_at + (parts_at + part) * most + place, best)
        keys = tl.where(keys == best, _LOWEST, keys)
    if is_last(counters_at, row, tiles):
        index = tl.arange(0, most_tiles)
        peaks = tl.load(part_peaks_at + parts_at + index, mask=index < tiles, other=-float("inf"), cache_modifier=".cg")
        sums = tl.load(part_sums_at + parts_at + index, mask=index < tiles, other=0.0, cache_modifier=".cg")
        peak = tl.max(peaks, 0)
        logarithm = tl.log(tl.sum(tl.where(sums > 0, sums * tl.exp(peaks - peak), sums), 0))
        own = tl.load(logits_at + tl.load(tokens_at + row))
        tl.store(chosen_at + row, own - peak - logarithm)
        item = tl.arange(0, listed)
        filled = (item // most < tiles) & (item % most < wanted)
        likely = tl.load(part_keys_at + parts_at * most + item, mask=filled, other=_LOWEST, cache_modifier=".cg")
        for place in range(wanted):
            best = tl.max(likely, 0)
            tl.store(top_ids_at + row * wanted + place, _id_of(best))
            tl.store(top_at + row * wanted + place, logit_of(best >> 32) - peak - logarithm)
            likely = tl.where(likely == best, _LOWEST, likely)


@kernel(do_not_specialize=["tiles"])
def count_before(
    logits_at, stride, tokens_at, parts_at, counters_at, ranks_at,
    vocabulary, tiles,
    tile: tl.constexpr, most_spans: tl.constexpr,
):  # fmt: skip
    """Count the tokens up to and including each row's token in the order. Grid: rows, spans of `tiles` tiles."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_at += row * stride
    own = tl.load(tokens_at + row)
    limit = tl.load(logits_at + own)
    before = tl.zeros((tile,), tl.int32)
    for index in range(tiles):
        token = (span * tiles + index) * tile + tl.arange(0, tile)
        logit = tl.load(logits_at + token, mask=token < vocabulary, other=-float("inf"))
        before += ((logit > limit) | ((logit == limit) & (token < own))).to(tl.int32)
    tl.store(parts_at + row * most_spans + span, tl.sum(before, 0))
    spans = tl.num_programs(1)
    if is_last(counters_at, row, spans):
        part = tl.arange(0, most_spans)
        parts = tl.load(parts_at + row * most_spans + part, mask=part < spans, other=0, cache_modifier=".cg")
        tl.store(ranks_at + row, 1 + tl.sum(parts, 0))


@kernel(do_not_specialize=["rows", "stride"])
def accept(sampled_at, stride, drafts_at, drafts_stride, num_drafts_at, accepted_at, rows, k, tile: tl.constexpr):
    """Count the leading drafts of each row that equal the sampled tokens."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = row < rows
    count = tl.load(num_drafts_at + row, mask=inside, other=0)
    accepted = tl.zeros((tile,), tl.int32)
    for place in range(k):
        sampled = tl.load(sampled_at + row * stride + place, mask=inside, other=-1)
        draft = tl.load(drafts_at + row * drafts_stride + place, mask=inside, other=-2)
        right = (sampled == draft) & (place < count) & (accepted == place)
        accepted += right.to(tl.int32)
    tl.store(accepted_at + row, accepted, mask=inside)


@kernel(do_not_specialize=["stride", "rows", "revoked"])
def write_matrix(
    sampled_at, stride, accepted_at, slots_at, revoked_at, matrix_at,
    rows, revoked, num_slots, width,
    empty: tl.constexpr, preempted: tl.constexpr, tile: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Write the token matrix [num_slots, width]. Grid: tiles of slots.

    Each slot searches all rows and revocations, so each cell is written once, by one program.
    """
    slot = tl.program_id(0) * tile + tl.arange(0, tile)
    row = tl.full((tile,), -1, tl.int32)
    for begin in range(0, rows, chunk):
        place = begin + tl.arange(0, chunk)
        owner = tl.load(slots_at + place, mask=place < rows, other=-1)
        row = tl.maximum(row, tl.max(tl.where(slot[:, None] == owner[None, :], place[None, :], -1), 1))
    released = tl.zeros((tile,), tl.int32)
    for begin in range(0, revoked, chunk):
        place = begin + tl.arange(0, chunk)
        owner = tl.load(revoked_at + place, mask=place < revoked, other=-1)
        released |= tl.max((slot[:, None] == owner[None, :]).to(tl.int32), 1)
    accepted = tl.load(accepted_at + row, mask=row >= 0, other=-1)
    for column in range(width):
        token = tl.load(sampled_at + row * stride + column, mask=column <= accepted, other=empty)
        if column == 0:
            token = tl.where(released > 0, preempted, token)
        tl.store(matrix_at + slot * width + column, token, mask=slot < num_slots)
