"""Sampling in one launch: random bits, softmax weights and the choice, as `fd_core.ops.contract.Ops.sample` defines it;
and the masks of `Ops.mask_logits` in one, which writes nothing but what is forbidden.

One program of sampling walks over the vocabulary of one row three times: for the largest logit, for the sum of the
weights, and for the token at which their running sum passes the random share. Weights are integers in float64, so sums
are exact in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fd_core.ops.contract import Array, SampleInput

__all__ = ["mask_logits", "sample"]

_TILE = 1024


def sample(logits: Array, rows: SampleInput) -> tuple[Array, Array]:
    """Choose a token for each row of float32[R, V], without filters; returns tokens int32[R] and peaks float32[R]."""
    count, vocabulary = logits.shape
    chosen = torch.empty(count, dtype=torch.int32, device=logits.device)
    peaks = torch.empty(count, dtype=torch.float32, device=logits.device)
    if count:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        _sample[(count,)](
            logits,
            logits.stride(0),
            rows.temperature,
            rows.seeds,
            rows.positions,
            chosen,
            peaks,
            vocabulary,
            tile=_TILE,
        )
    return chosen, peaks


def mask_logits(logits: Array, rows: Array, bits: Array) -> Array:
    """Set logits float32[R, V] of tokens whose bit is 0 to -inf, in rows int32[n] by bits int32[n, ceil(V / 32)]."""
    count, vocabulary = len(rows), logits.shape[1]
    if count:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        grid = (count, triton.cdiv(vocabulary, _TILE))
        _mask[grid](logits, logits.stride(0), rows, bits, bits.stride(0), vocabulary, tile=_TILE)
    return logits


@triton.jit
def _mask(logits_at, stride, rows_at, bits_at, words, vocabulary, tile: tl.constexpr):
    index = tl.program_id(0)
    row = tl.load(rows_at + index).to(tl.int64)
    token = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = token < vocabulary
    word = tl.load(bits_at + index.to(tl.int64) * words + token // 32, mask=inside, other=0)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits_at + row * stride + token, -float("inf"), mask=forbidden)


@triton.jit
def _weights(logits_at, vocabulary, begin, largest, temperature, tile: tl.constexpr):
    """Return float64[tile]: rint(2^32 * exp((logit - largest) / temperature)), 0 beyond the vocabulary."""
    token = begin + tl.arange(0, tile)
    logit = tl.load(logits_at + token, mask=token < vocabulary, other=-float("inf")).to(tl.float64)
    weight = tl.exp((logit - largest) / temperature) * 4294967296.0
    # Numbers from 2^52 on are whole, so adding 2^52 rounds to a whole number, to the even one if it is halfway.
    return (weight + 4503599627370496.0) - 4503599627370496.0


@triton.jit
def _sample(
    logits_at,
    stride,
    temperature_at,
    seeds_at,
    positions_at,
    chosen_at,
    peaks_at,
    vocabulary,
    tile: tl.constexpr,
):
    row = tl.program_id(0)
    logits_at += row.to(tl.int64) * stride
    largest = -float("inf")
    chosen = 0
    strange = 0
    for begin in range(0, vocabulary, tile):
        token = begin + tl.arange(0, tile)
        logit = tl.load(logits_at + token, mask=token < vocabulary, other=-float("inf"))
        best, where = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
        if best > largest:
            largest = best
            chosen = begin + where
        strange += tl.sum((logit != logit).to(tl.int32), 0)
    tl.store(peaks_at + row, tl.where(strange > 0, float("nan"), largest))
    temperature = tl.load(temperature_at + row).to(tl.float64)
    if temperature > 0:
        wide = tl.cast(largest, tl.float64)
        mass = tl.zeros((tile,), tl.float64)
        for begin in range(0, vocabulary, tile):
            mass += _weights(logits_at, vocabulary, begin, wide, temperature, tile)
        zero = tl.load(positions_at + row) * 0
        bits, _, _, _ = tl.philox(
            tl.load(seeds_at + row).to(tl.uint64, bitcast=True),
            tl.load(positions_at + row).to(tl.uint32),
            zero.to(tl.uint32),
            zero.to(tl.uint32),
            zero.to(tl.uint32),
        )
        share = (bits >> 8).to(tl.float64) * (1.0 / 16777216.0) * tl.sum(mass, 0)
        before = share * 0.0
        passed = 0
        for begin in range(0, vocabulary, tile):
            weight = _weights(logits_at, vocabulary, begin, wide, temperature, tile)
            # The running sum never falls, so the tokens that stay at or below the share are those before the choice.
            running = before + tl.cumsum(weight, 0)
            token = begin + tl.arange(0, tile)
            passed += tl.sum(((running <= share) & (token < vocabulary)).to(tl.int32), 0)
            before += tl.sum(weight, 0)
        chosen = passed
    tl.store(chosen_at + row, chosen)
