"""Ranks that compute one model together: which share each has, and sums and gathers over memory that all of them map.

    header   | a word that says whether the group was abandoned, and for each rank the number of its last exchange
    slots    | two for each rank, for even and odd exchanges

An exchange has a number, the same on all ranks. A rank writes what it has into its slot, then its number into the
header, and reads the others once their numbers are there. A slot is written again two exchanges later; by then every
rank has begun the exchange between, so nobody reads it any more. `native/csrc/group.h` is the same in C++.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

__all__ = ["HEADER_BYTES", "SLOT_BYTES", "Parallel", "RankGroup", "RanksApart", "group_bytes"]

_LINE: Final = 64
"""Bytes between two words of the header, so that ranks do not share a cache line."""
HEADER_BYTES: Final = 1 << 13
SLOT_BYTES: Final = 1 << 29
"""Of one slot; memory is taken when it is first written."""
_SPINS: Final = 200
_NAP_SECONDS: Final = 2e-5


class RanksApart(Exception):
    """An exchange between ranks did not come to its end; the text says why."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Which rank of how many computes; each holds a share of every layer."""

    rank: int = 0
    size: int = 1

    def share(self, units: int) -> slice:
        """Return which of `units` are this rank's: all ranks have as many, the first ones one more if need be."""
        each, more = divmod(units, self.size)
        first = self.rank * each + min(self.rank, more)
        return slice(first, first + each + (self.rank < more))


def group_bytes(size: int) -> int:
    """Return the bytes of the memory that a group of `size` ranks maps."""
    return HEADER_BYTES + 2 * size * SLOT_BYTES


class RankGroup:
    """One rank's end of the exchanges between all ranks. Used from one thread.

    Every rank must call the same methods in the same order, with arrays of the same shape. What they return has the
    same bits on all ranks: sums are taken in the order of ranks.
    """

    def __init__(self, parallel: Parallel, descriptor: int, patience: float) -> None:
        """`descriptor` is a file of `group_bytes`, zeroed at first; others are awaited for `patience` seconds."""
        self.parallel = parallel
        self.patience = patience
        self._memory = mmap.mmap(descriptor, group_bytes(parallel.size))
        whole = np.frombuffer(self._memory, np.uint8)
        self.address = int(whole.ctypes.data)
        """Of the mapped memory."""
        words = whole[:HEADER_BYTES].view(np.uint64)[:: _LINE // 8]
        self._abandoned, self._numbers = words[:1], words[1 : 1 + parallel.size]
        self._slots = whole[HEADER_BYTES:].reshape(parallel.size, 2, SLOT_BYTES)

    def abandon(self) -> None:
        """Have every exchange, of all ranks, end with `RanksApart`. Any thread."""
        self._abandoned[0] = 1

    @property
    def abandoned(self) -> bool:
        """Whether a rank has abandoned the group."""
        return bool(self._abandoned[0])

    def all_reduce(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the sum of what all ranks hold, [n, ...] each."""
        total = np.zeros_like(x)
        for rows in self._pieces(x):
            for part in self._exchange(x[rows]):
                total[rows] += part
        return total

    def all_gather(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what all ranks hold, [n, ...] each, joined along the last axis in the order of ranks."""
        pieces = [np.concatenate(list(self._exchange(x[rows])), axis=-1) for rows in self._pieces(x)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def own_slot(self, exchanges: int, count: int) -> npt.NDArray[np.float32]:
        """Return `count` numbers of the slot that this rank uses in the last of the next `exchanges`."""
        rank = self.parallel.rank
        place = (int(self._numbers[rank]) + exchanges) % 2
        return self._slots[rank, place, : 4 * count].view(np.float32)

    def refuse(self, rank: int) -> NoReturn:
        """Say that a rank was waited for in vain."""
        raise RanksApart(f"rank {rank} was not heard of for {self.patience:g} s in the middle of a step")

    def _pieces(self, x: npt.NDArray[Any]) -> list[slice]:
        """Return which rows of `x` are exchanged at a time."""
        count = max(1, len(x) * SLOT_BYTES // max(x.nbytes, 1))
        return [slice(begin, begin + count) for begin in range(0, max(len(x), 1), count)]

    def _exchange(self, x: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
        """Yield what each rank holds, as views that are good until the next exchange."""
        number = int(self._numbers[self.parallel.rank]) + 1
        place = number % 2
        np.copyto(self._slots[self.parallel.rank, place, : x.nbytes].view(x.dtype).reshape(x.shape), x)
        self._numbers[self.parallel.rank] = number
        for rank in range(self.parallel.size):
            self._wait_for(rank, number)
            yield self._slots[rank, place, : x.nbytes].view(x.dtype).reshape(x.shape)

    def _wait_for(self, rank: int, number: int) -> None:
        spins, deadline = 0, 0.0
        while int(self._numbers[rank]) < number:
            if self._abandoned[0]:
                raise RanksApart("the other ranks are gone")
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            now = time.monotonic()
            deadline = deadline or now + self.patience
            if now > deadline:
                self.refuse(rank)
            time.sleep(_NAP_SECONDS)
