"""Sampling as `fd_core.ops.contract.Ops.sample` defines it: one launch finds the largest logits, and one draws.

Greedy rows need the first alone; `filters` may cut rows in between. A row is shared by several programs, each of which
has a span of it. Weights are integers in float64, so sums of them are exact in any order: how many spans there are
changes no choice.

The exponential is that of CUDA's library on a device, and numpy's in the interpreter. Each errs by about a unit in the
last place, so of the weights of a row, 2^-52 times their sum is how many may differ, by 1. A row then chooses another
token only if the random share falls between two sums that differ by 1, of which there is one for each token: about once
in 10^10 draws from a vocabulary of 2^17. The kit compares tokens exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fd_gpu_cuda.kernels.entry import kernel
from fd_gpu_cuda.kernels.vocabulary import is_last, weight_of


@kernel(do_not_specialize=["tiles"])
def find_peaks(
    logits_at,
    stride,
    part_peaks_at,
    part_places_at,
    part_lows_at,
    counters_at,
    peaks_at,
    lows_at,
    chosen_at,
    vocabulary,
    tiles,
    tile: tl.constexpr,
    most_spans: tl.constexpr,
):
    """Find the largest logit of each row, the lowest id that has it, and the smallest logit that is not -inf.

    Grid: rows, spans of `tiles` tiles.
    """
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_at += row * stride
    begin = span * tiles * tile
    best = tl.full((tile,), -float("inf"), tl.float32)
    low = tl.full((tile,), float("inf"), tl.float32)
    place = begin + tl.arange(0, tile)
    strange = tl.zeros((tile,), tl.int32)
    for index in range(tiles):
        token = begin + index * tile + tl.arange(0, tile)
        logit = tl.load(logits_at + token, mask=token < vocabulary, other=-float("inf"))
        strange |= (logit != logit).to(tl.int32)
        place = tl.where(logit > best, token, place)
        best = tl.where(logit > best, logit, best)
        low = tl.where((logit < low) & (logit > -float("inf")), logit, low)
    peak = tl.max(best, 0)
    first = tl.min(tl.where(best == peak, place, vocabulary - 1), 0)
    tl.store(part_peaks_at + row * most_spans + span, tl.where(tl.max(strange, 0) > 0, float("nan"), peak))
    tl.store(part_places_at + row * most_spans + span, first)
    tl.store(part_lows_at + row * most_spans + span, tl.min(low, 0))
    spans = tl.num_programs(1)
    if is_last(counters_at, row, spans):
        part = tl.arange(0, most_spans)
        inside = part < spans
        parts_at = row * most_spans + part
        parts = tl.load(part_peaks_at + parts_at, mask=inside, other=-float("inf"), cache_modifier=".cg")
        places = tl.load(part_places_at + parts_at, mask=inside, other=0, cache_modifier=".cg")
        lows = tl.load(part_lows_at + parts_at, mask=inside, other=float("inf"), cache_modifier=".cg")
        unknown = tl.max((parts != parts).to(tl.int32), 0) > 0
        parts = tl.where(parts != parts, -float("inf"), parts)
        peak = tl.max(parts, 0)
        first = tl.min(tl.where(inside & (parts == peak), places, vocabulary - 1), 0)
        tl.store(peaks_at + row, tl.where(unknown, float("nan"), peak))
        tl.store(lows_at + row, tl.min(lows, 0))
        tl.store(chosen_at + row, first)


@triton.jit
def _share(seed, position):
    """Return the random number of a seed and a position, a multiple of 2^-24 below 1, in float64."""
    zero = position * 0
    key = seed.to(tl.uint64, bitcast=True)
    counter = position.to(tl.uint32)
    bits, _, _, _ = tl.philox(key, counter, zero.to(tl.uint32), zero.to(tl.uint32), zero.to(tl.uint32))
    return (bits >> 8).to(tl.float64) * (1.0 / 16777216.0)


@triton.jit
def _kept(logits_at, token, vocabulary, peak, temperature, cut, least):
    """Return the weights of tokens above the cut, and 1 for each token that is at it."""
    logit = tl.load(logits_at + token, mask=token < vocabulary, other=-float("inf"))
    weight = weight_of(logit.to(tl.float64), peak, temperature)
    weight = tl.where((logit > cut) & (weight >= least), weight, 0.0)
    return weight, ((logit == cut) & (token < vocabulary)).to(tl.int32)


@kernel(do_not_specialize=["tiles"])
def draw(
    logits_at,
    stride,
    temperature_at,
    min_p_at,
    seeds_at,
    positions_at,
    peaks_at,
    cuts_at,
    ties_at,
    part_masses_at,
    part_ties_at,
    counters_at,
    chosen_at,
    vocabulary,
    tiles,
    filtered: tl.constexpr,
    tile: tl.constexpr,
    most_spans: tl.constexpr,
):
    """Draw a token for each row that is not greedy. Grid: rows, spans of `tiles` tiles.

    Where `filtered`, tokens above `cuts_at[row]` are drawn from, and of those at it the first `ties_at[row]`.
    """
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_at + row).to(tl.float64)
    if temperature > 0:
        logits_at += row * stride
        peak = tl.load(peaks_at + row).to(tl.float64)
        cut = -float("inf")
        allowed = 0
        least = temperature * 0
        tie_weight = temperature * 0
        if filtered:
            cut = tl.load(cuts_at + row)
            allowed = tl.load(ties_at + row)
            least = tl.load(min_p_at + row).to(tl.float64) * 4294967296.0
            tie_weight = weight_of(cut.to(tl.float64), peak, temperature)
            tie_weight = tl.where(tie_weight >= least, tie_weight, 0.0)
        masses = tl.zeros((tile,), tl.float64)
        ties = tl.zeros((tile,), tl.int32)
        for index in range(tiles):
            token = (span * tiles + index) * tile + tl.arange(0, tile)
            weight, tied = _kept(logits_at, token, vocabulary, peak, temperature, cut, least)
            masses += weight
            ties += tied
        tl.store(part_masses_at + row * most_spans + span, tl.sum(masses, 0))
        if filtered:
            tl.store(part_ties_at + row * most_spans + span, tl.sum(ties, 0))
        spans = tl.num_programs(1)
        if is_last(counters_at, row, spans):
            part = tl.arange(0, most_spans)
            parts_at = row * most_spans + part
            parts = tl.load(part_masses_at + parts_at, mask=part < spans, other=0.0, cache_modifier=".cg")
            seen = 0
            if filtered:
                span_ties = tl.load(part_ties_at + parts_at, mask=part < spans, other=0, cache_modifier=".cg")
                left = tl.maximum(allowed - (tl.cumsum(span_ties, 0) - span_ties), 0)
                parts += tl.minimum(span_ties, left).to(tl.float64) * tie_weight
            share = _share(tl.load(seeds_at + row), tl.load(positions_at + row)) * tl.sum(parts, 0)
            # Running sums never fall, so what stays at or below the share is what comes before the choice.
            passed = tl.sum(((tl.cumsum(parts, 0) <= share) & (part < spans)).to(tl.int32), 0)
            passed = tl.minimum(passed, spans - 1)
            before = tl.sum(tl.where(part < passed, parts, 0.0), 0)
            if filtered:
                seen = tl.sum(tl.where(part < passed, span_ties, 0), 0)
            begin = passed * tiles * tile
            chosen = begin
            for index in range(tiles):
                if before <= share:
                    token = begin + index * tile + tl.arange(0, tile)
                    weight, tied = _kept(logits_at, token, vocabulary, peak, temperature, cut, least)
                    if filtered:
                        rank = seen + tl.cumsum(tied, 0) - tied
                        weight += tl.where((tied > 0) & (rank < allowed), tie_weight, 0.0)
                        seen += tl.sum(tied, 0)
                    running = before + tl.cumsum(weight, 0)
                    chosen += tl.sum(((running <= share) & (token < vocabulary)).to(tl.int32), 0)
                    before += tl.sum(weight, 0)
            tl.store(chosen_at + row, tl.minimum(chosen, vocabulary - 1))
