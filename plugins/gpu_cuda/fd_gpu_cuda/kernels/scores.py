"""Log-probabilities, the most likely tokens, and ranks; one launch each, without sorting a vocabulary.

Each program lists the most likely tokens of its tile by taking the largest key again and again, and the last program of
a row takes those of all lists. A key holds a logit in its upper word and orders equal ones by id in its lower, so
no two are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fd_gpu_cuda.kernels.entry import kernel
from fd_gpu_cuda.kernels.vocabulary import is_last, key_of, logit_of

_LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _id_of(key):
    """Return the id in a key, and any of the vocabulary where there is none."""
    return tl.where(key == _LOWEST, 0, (4294967295 - (key & 4294967295))).to(tl.int32)


@kernel(do_not_specialize=["wanted"])
def score(
    logits_at,
    stride,
    tokens_at,
    part_peaks_at,
    part_sums_at,
    part_keys_at,
    counters_at,
    chosen_at,
    top_ids_at,
    top_at,
    vocabulary,
    wanted,
    tile: tl.constexpr,
    most_tiles: tl.constexpr,
    most: tl.constexpr,
    listed: tl.constexpr,
):
    """Score each row's token and its `wanted` most likely ones, at most `most`. Grid: rows, tiles.

    `part_keys_at` has room for `most` keys of each tile, of which `listed` hold those of the vocabulary.
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
    logits_at,
    stride,
    tokens_at,
    parts_at,
    counters_at,
    ranks_at,
    vocabulary,
    tiles,
    tile: tl.constexpr,
    most_spans: tl.constexpr,
):
    """Count the tokens that come before each row's, itself included. Grid: rows, spans of `tiles` tiles."""
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
