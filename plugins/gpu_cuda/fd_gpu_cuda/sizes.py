"""Which batch sizes a decode is computed as. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["graph_sizes", "padded"]

_DENSE_UPTO = 8
_STEP = 8
_COARSE_FROM = 128
_COARSE_STEP = 32
_LARGEST = 512
"""Decodes of more rows are bound by computing, not by launching: a graph would save nothing."""


def graph_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the sizes to capture, ascending: powers of two, then steps of 8, then of 32.

    The largest is what the limits allow, or 512, so padding never exceeds the budget: where a decode of n rows fits,
    so does the next size.
    """
    limit = min(max_num_seqs, max_num_batched_tokens, _LARGEST)
    small = [1 << power for power in range(_DENSE_UPTO.bit_length())]
    medium = range(2 * _STEP, _COARSE_FROM, _STEP)
    large = range(_COARSE_FROM, _LARGEST + 1, _COARSE_STEP)
    return (*(size for size in (*small, *medium, *large) if size < limit), limit)


def padded(rows: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest of `sizes` that holds `rows`, or `rows` itself if none does."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else rows
