"""Which shapes decodes are computed as, so that a graph can be replayed for each. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fd_core.config import Limits

_DENSE_UPTO = 8
_STEP = 8
_COARSE_FROM = 128
_COARSE_STEP = 32
_LARGEST = 512
"""Decodes of more rows are bound by computing, not by launching: a graph would save nothing."""
_LARGEST_DRAFTED = 256
"""Tokens of a decode with drafts. So many are multiplied in the time in which the weights are read, on an H100 as on an
A100, so what short rows are padded with costs next to nothing."""


@dataclass(frozen=True)
class GraphShapes:
    """Shapes to capture: rows of one token, and rows of 1 + k tokens, in fewer sizes."""

    single: tuple[int, ...]
    """Numbers of rows, ascending."""
    drafted: tuple[int, ...]
    """The same for rows of `width` tokens; none without drafts."""
    width: int

    @classmethod
    def of(cls, limits: Limits) -> GraphShapes:
        """Return the shapes for an engine's limits; none has more tokens than its step token budget.

        One token a row: powers of two, then steps of 8, then of 32, up to the most rows that the limits allow. So where
        a decode fits the budget, it fits padded. With drafts: powers of two.
        """
        width, budget = 1 + limits.max_drafts, limits.max_num_batched_tokens
        powers = [1 << power for power in range(_DENSE_UPTO.bit_length())]
        medium = range(2 * _STEP, _COARSE_FROM, _STEP)
        large = range(_COARSE_FROM, _LARGEST + 1, _COARSE_STEP)
        most = min(limits.max_num_seqs, budget, _LARGEST)
        single = (*(size for size in (*powers, *medium, *large) if size < most), most)
        most = min(limits.max_num_seqs, min(budget, _LARGEST_DRAFTED) // width) if width > 1 else 0
        drafted = (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most) if most else ()
        return cls(single, drafted, width)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (rows, tokens of a row), the shape with the most tokens first."""
        shapes = [*((rows, 1) for rows in self.single), *((rows, self.width) for rows in self.drafted)]
        return iter(sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape), reverse=True))

    @cached_property
    def most_tokens(self) -> int:
        """Tokens of the largest shape; 0 if there is none."""
        return max((rows * width for rows, width in self), default=0)

    def fitting(self, rows: int, width: int) -> tuple[int, int] | None:
        """Return the smallest shape that holds `rows` rows with up to `width` tokens each, if there is one."""
        if width > self.width:
            return None
        sizes, width = (self.single, 1) if width == 1 else (self.drafted, self.width)
        index = bisect_left(sizes, rows)
        return (sizes[index], width) if index < len(sizes) else None
