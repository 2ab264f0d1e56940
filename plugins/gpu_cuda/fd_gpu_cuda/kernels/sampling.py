"""Sampling as specified by `fd_core.ops.contract.Ops.sample`: one launch finds the largest logits, and one draws.

Greedy rows only need the first. A row is shared by several programs, each with a span of it. Weights are integers in
float64, so sums are exact in any order, and the number of spans does not affect results.

The exponential is that of CUDA's library on a device, and numpy's in the interpreter. Each has an error of about one
unit in the last place, so about 2^-52 times their sum of a row's weights may differ, by 1. A row then samples another
token only if the random share falls between two sums that differ by 1, one per token: about once in 10^10 draws from a
vocabulary of 2^17. The kit compares tokens exactly.

Two launches in between find the cuts of top_k and top_p without sorting a vocabulary. A prefix of the tokens, ordered
by logit and, on a tie, by id, is kept. So a cut is a logit, and the number of kept tokens with that logit:

- `fill_bins` counts and weighs the tokens of each row by distance from the largest, in bins of a constant ratio of
  weights. Its last program finds the few bins that can contain the two cuts. top_p depends on the result of top_k, for
  which only two bounds are known here: each bound yields a bin.
- `find_cuts` lists the tokens in those bins. Its last program searches the bits of their logits, four at a time: the
  largest key from which on the count, or the weight, of tokens suffices. If the list is too short, it reads the whole
  row instead, with one program and several times, which is slow and not yet measured.

Bins are monotonic in the distance from the peak, so tokens of an earlier bin always precede. Tokens of the last bin
have weight 0, so it does not matter if they are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fd_gpu_cuda.kernels.entry import kernel
from fd_gpu_cuda.kernels.logits import is_last, key_of, logit_of, weight_of

BINS = tl.constexpr(256)
BOUNDS = tl.constexpr(8)
"""Results of `fill_bins` per row: first bin, last bin, tokens and weight before the first bin, a flag if top_k cuts,
and the weight of all tokens."""


@triton.jit
def _cuts(temperature, top_k, top_p, vocabulary):
    """Return True if a row has a filter."""
    return (temperature > 0) & (((top_k > 0) & (top_k < vocabulary)) | (top_p < 1.0))


@triton.jit
def _bins_of_one(peak, low, temperature):
    """Return the number of bins per factor e of weight: with 11, all nonzero weights are in the first 252.

    It is larger if logits are close together, so that they spread over all bins.
    """
    spread = (peak - low) / temperature
    return tl.minimum(tl.maximum(254.5 / tl.maximum(spread, 1e-30), 11.0), 1e30)


@triton.jit
def _bin(logit, peak, temperature, scale):
    """Return the bins of float64 logits."""
    return tl.minimum(tl.maximum((peak - logit) / temperature * scale, 0.0), 255.0).to(tl.int32)


@kernel(do_not_specialize=["tiles"])
def fill_bins(
    logits_at, stride, temperature_at, top_k_at, top_p_at, peaks_at, lows_at, counts_at, masses_at, bounds_at,
    counters_at,
    vocabulary, tiles,
    tile: tl.constexpr, copies: tl.constexpr,
):  # fmt: skip
    """Fill the bins of filtered rows, and find the relevant ones. Grid: rows, spans of `tiles` tiles.

    The bins have several copies, int32 and float64 [rows, copies, 256], to reduce contention of atomic additions. They
    are zero before and after.
    """
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_at + row).to(tl.float64)
    top_k = tl.load(top_k_at + row)
    top_p = tl.load(top_p_at + row).to(tl.float64)
    if _cuts(temperature, top_k, top_p, vocabulary):
        logits_at += row * stride
        peak = tl.load(peaks_at + row).to(tl.float64)
        scale = _bins_of_one(peak, tl.load(lows_at + row).to(tl.float64), temperature)
        own = (row * copies + span % copies) * BINS
        for index in range(tiles):
            token = (span * tiles + index) * tile + tl.arange(0, tile)
            logit = tl.load(logits_at + token, mask=token < vocabulary, other=-float("inf")).to(tl.float64)
            place = _bin(logit, peak, temperature, scale)
            weighs = (token < vocabulary) & (place < 255)
            tl.atomic_add(counts_at + own + place, 1, mask=weighs, sem="relaxed")
            if top_p < 1.0:
                weight = weight_of(logit, peak, temperature)
                tl.atomic_add(masses_at + own + place, weight, mask=weighs, sem="relaxed")
        if is_last(counters_at, row, tl.num_programs(1)):
            bins = tl.arange(0, BINS)
            cells = row * copies * BINS + tl.arange(0, copies)[:, None] * BINS + bins[None, :]
            counts = tl.sum(tl.load(counts_at + cells, cache_modifier=".cg"), 0)
            masses = tl.sum(tl.load(masses_at + cells, cache_modifier=".cg"), 0)
            tl.debug_barrier()  # all threads have read before some overwrite
            tl.store(counts_at + cells, 0)
            tl.store(masses_at + cells, 0.0)
            by_count = tl.where(top_k > 0, tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0), BINS)
            # The weight after top_k is between `fewest` and `most`, and top_p keeps a share of it.
            total = tl.sum(masses, 0)
            fewest = tl.sum(tl.where(bins < by_count, masses, 0.0), 0)
            most = tl.sum(tl.where(bins <= by_count, masses, 0.0), 0)
            reached = tl.cumsum(masses, 0)
            first, last = by_count, by_count
            if top_p < 1.0:
                first = tl.sum((reached < tl.maximum(tl.ceil(top_p * fewest), 1.0)).to(tl.int32), 0)
                if by_count == BINS:
                    last = tl.sum((reached < tl.maximum(tl.ceil(top_p * most), 1.0)).to(tl.int32), 0)
                first = tl.minimum(first, last)
            bounds_at += row * BOUNDS
            tl.store(bounds_at, first.to(tl.float64))
            tl.store(bounds_at + 1, last.to(tl.float64))
            tl.store(bounds_at + 2, tl.sum(tl.where(bins < first, counts, 0), 0).to(tl.float64))
            tl.store(bounds_at + 3, tl.sum(tl.where(bins < first, masses, 0.0), 0))
            tl.store(bounds_at + 4, tl.where(by_count < BINS, 1.0, 0.0).to(tl.float64))
            tl.store(bounds_at + 5, total)


@triton.jit
def _candidates(logits_at, listed_at, listed, begin, count, low, high, chunk: tl.constexpr):
    """Return the logits and keys of a chunk of tokens, and a mask of keys in [low, high]."""
    place = begin + tl.arange(0, chunk)
    inside = place < count
    token = place
    if listed:
        token = tl.load(listed_at + place, mask=inside, other=0, cache_modifier=".cg")
    logit = tl.load(logits_at + token, mask=inside, other=0.0)
    key = key_of(logit)
    return logit.to(tl.float64), key, inside & (key >= low) & (key <= high)


@triton.jit
def _reach(
    logits_at, listed_at,
    listed, count, low, high, peak, temperature, before, wanted,
    weighs: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Return the largest key from which on the tokens, with all earlier ones, reach at least `wanted`."""
    ways = tl.arange(0, 16)
    lowest, highest = low, high
    while highest > lowest:
        step = (highest - lowest + 16) // 16
        pivots = lowest + ways * step
        sums = tl.zeros((16,), tl.float64)
        for begin in range(0, count, chunk):
            logit, key, member = _candidates(logits_at, listed_at, listed, begin, count, low, high, chunk)
            if weighs:
                value = tl.where(member, weight_of(logit, peak, temperature), 0.0)
            else:
                value = member.to(tl.float64)
            sums += tl.sum(tl.where(key[:, None] >= pivots[None, :], value[:, None], 0.0), 0)
        enough = tl.sum(((before + sums >= wanted) & (pivots <= highest)).to(tl.int64), 0)
        lowest += tl.maximum(enough - 1, 0) * step
        highest = tl.minimum(highest, lowest + step - 1)
    return lowest


@kernel(do_not_specialize=["tiles"])
def find_cuts(
    logits_at, stride, temperature_at, top_k_at, top_p_at, peaks_at, lows_at, bounds_at, listed_at, lengths_at,
    cuts_at, ties_at, counters_at,
    vocabulary, tiles,
    room: tl.constexpr, tile: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Find the logit of each row's cut, and the number of kept tokens with it. Grid: rows, spans.

    Rows without a filter keep all logits above -inf.
    """
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_at + row).to(tl.float64)
    top_k = tl.load(top_k_at + row)
    top_p = tl.load(top_p_at + row).to(tl.float64)
    bounds_at += row * BOUNDS
    first = BINS
    if _cuts(temperature, top_k, top_p, vocabulary):
        first = tl.load(bounds_at).to(tl.int32)
    if first == BINS:  # no cut, or top_k beyond all nonzero weights
        if span == 0:
            tl.store(cuts_at + row, -float("inf"))
            tl.store(ties_at + row, 0)
    else:
        last = tl.load(bounds_at + 1).to(tl.int32)
        logits_at += row * stride
        listed_at += row * room
        peak = tl.load(peaks_at + row).to(tl.float64)
        scale = _bins_of_one(peak, tl.load(lows_at + row).to(tl.float64), temperature)
        for index in range(tiles):
            token = (span * tiles + index) * tile + tl.arange(0, tile)
            logit = tl.load(logits_at + token, mask=token < vocabulary, other=-float("inf")).to(tl.float64)
            place = _bin(logit, peak, temperature, scale)
            member = (token < vocabulary) & (place >= first) & (place <= last)
            found = tl.sum(member.to(tl.int32), 0)
            if found > 0:
                at = tl.atomic_add(lengths_at + row, found, sem="relaxed")
                at += tl.cumsum(member.to(tl.int32), 0) - 1
                tl.store(listed_at + at, token, mask=member & (at < room))
        if is_last(counters_at, row, tl.num_programs(1)):
            length = tl.load(lengths_at + row, cache_modifier=".cg")
            tl.debug_barrier()  # all threads have read before one overwrites
            tl.store(lengths_at + row, 0)
            listed = length <= room
            count = tl.where(listed, length, vocabulary)
            key, ties = _search(
                logits_at, listed_at, listed, count, peak, temperature, scale, top_k, top_p, bounds_at, first, last,
                chunk,
            )  # fmt: skip
            tl.store(cuts_at + row, logit_of(key))
            tl.store(ties_at + row, ties)


@triton.jit
def _search(
    logits_at, listed_at,
    listed, count, peak, temperature, scale, top_k, top_p,
    bounds_at,
    first, last,
    chunk: tl.constexpr,
):  # fmt: skip
    """Return the key of the cut and the number of kept tokens with that key."""
    tokens_before = tl.load(bounds_at + 2)
    mass_before = tl.load(bounds_at + 3)
    limited = tl.load(bounds_at + 4) > 0
    kept = tl.load(bounds_at + 5)
    low = tl.full((), 2147483647, tl.int64)
    high = -low
    for begin in range(0, count, chunk):
        logit, key, inside = _candidates(logits_at, listed_at, listed, begin, count, -2147483648, 2147483647, chunk)
        place = _bin(logit, peak, temperature, scale)
        member = inside & (place >= first) & (place <= last)
        low = tl.minimum(low, tl.min(tl.where(member, key, 2147483647), 0))
        high = tl.maximum(high, tl.max(tl.where(member, key, -2147483647), 0))
    cut = low
    ties = top_k
    if limited:
        wanted = top_k.to(tl.float64)
        cut = _reach(
            logits_at, listed_at, listed, count, low, high, peak, temperature, tokens_before, wanted, False, chunk
        )
        above, kept = _above(logits_at, listed_at, listed, count, cut, high, peak, temperature, chunk)
        ties = (wanted - tokens_before - above).to(tl.int32)
        kept += mass_before + ties.to(tl.float64) * weight_of(logit_of(cut).to(tl.float64), peak, temperature)
    if top_p < 1.0:
        # Sums are integers, so comparing with top_p times the kept weight equals comparing with the next integer.
        wanted = tl.maximum(tl.ceil(top_p * kept), 1.0)
        reached = _reach(
            logits_at, listed_at, listed, count, cut, high, peak, temperature, mass_before, wanted, True, chunk
        )
        _, mass = _above(logits_at, listed_at, listed, count, reached, high, peak, temperature, chunk)
        weight = tl.maximum(weight_of(logit_of(reached).to(tl.float64), peak, temperature), 1.0).to(tl.int64)
        left = (wanted - mass_before - mass).to(tl.int64)
        part = ((left + weight - 1) // weight).to(tl.int32)
        ties = tl.where(limited & (reached == cut), tl.minimum(part, ties), part)
        cut = reached
    return cut, ties


@triton.jit
def _above(logits_at, listed_at, listed, count, cut, high, peak, temperature, chunk: tl.constexpr):
    """Return the number and the weight of tokens with keys beyond a cut, up to `high`."""
    tokens = tl.zeros((chunk,), tl.float64)
    masses = tl.zeros((chunk,), tl.float64)
    for begin in range(0, count, chunk):
        logit, _, member = _candidates(logits_at, listed_at, listed, begin, count, cut + 1, high, chunk)
        tokens += member.to(tl.float64)
        masses += tl.where(member, weight_of(logit, peak, temperature), 0.0)
    return tl.sum(tokens, 0), tl.sum(masses, 0)


@kernel(do_not_specialize=["tiles"])
def find_peaks(
    logits_at, stride, part_peaks_at, part_places_at, part_lows_at, counters_at, peaks_at, lows_at, chosen_at,
    vocabulary, tiles,
    tile: tl.constexpr, most_spans: tl.constexpr,
):  # fmt: skip
    """Find the largest logit of each row, its lowest id, and the smallest logit above -inf.

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
    """Return the weights of tokens above the cut, and 1 per token at it."""
    logit = tl.load(logits_at + token, mask=token < vocabulary, other=-float("inf"))
    weight = weight_of(logit.to(tl.float64), peak, temperature)
    weight = tl.where((logit > cut) & (weight >= least), weight, 0.0)
    return weight, ((logit == cut) & (token < vocabulary)).to(tl.int32)


@kernel(do_not_specialize=["tiles"])
def draw(
    logits_at, stride, temperature_at, min_p_at, seeds_at, positions_at, peaks_at, cuts_at, ties_at, part_masses_at,
    part_ties_at, counters_at, chosen_at,
    vocabulary, tiles,
    filtered: tl.constexpr, tile: tl.constexpr, most_spans: tl.constexpr,
):  # fmt: skip
    """Draw a token for each row that is not greedy. Grid: rows, spans of `tiles` tiles.

    With `filtered`, candidates are the tokens above `cuts_at[row]`, and the first `ties_at[row]` at it.
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
            # Running sums are monotonic, so the tokens with sums at or below the share precede the choice.
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
