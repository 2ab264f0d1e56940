"""Which workers hold a block: for each block one number, in which each worker has a bit.

Each engine of a worker that has several is a worker here.

So a prompt is compared with what a thousand workers hold in a few operations a block, and not once for each worker.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import numpy as np

__all__ = ["Holders"]

_FEW: Final = 8
"""So many bits are looked at one by one."""


class Holders:
    """The blocks of every worker. A worker has a bit from its first block until `leave`."""

    def __init__(self) -> None:
        self._places: dict[Hashable, int] = {}
        self._free: list[int] = []
        """Places of workers that left, a heap: numbers stay as short as there are workers."""
        self._of: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._of)

    def bit(self, worker: Hashable) -> int:
        """Return the number in which only this worker has its bit."""
        place = self._places.get(worker)
        if place is None:
            place = heapq.heappop(self._free) if self._free else len(self._places)
            self._places[worker] = place
        return 1 << place

    def add(self, bit: int, keys: Iterable[bytes]) -> None:
        """The worker with this `bit` holds blocks that it did not hold."""
        of = self._of
        for key in keys:
            others = of.get(key)
            # One number for all blocks that this worker alone holds, which are most.
            of[key] = bit if others is None else others | bit

    def discard(self, bit: int, keys: Iterable[bytes]) -> None:
        """The worker with this `bit` holds blocks no longer; those that it did not hold change nothing."""
        of = self._of
        for key in keys:
            holders = of.get(key, 0)
            if holders == bit:
                del of[key]
            elif holders & bit:
                of[key] = holders ^ bit

    def leave(self, worker: Hashable) -> None:
        """Give back the bit of a worker that holds nothing."""
        place = self._places.pop(worker, None)
        if place is not None:
            heapq.heappush(self._free, place)

    def leading(self, keys: Sequence[bytes], workers: Sequence[Hashable]) -> list[int]:
        """Return how many leading blocks each of `workers` holds, given that none holds one without those before it.

        Looks at the logarithm of the blocks for each place where workers part.
        """
        found: list[tuple[int, int]] = []
        open_ = [(0, len(keys), self._everyone())] if keys else []
        while open_:
            least, most, here = open_.pop()
            if least == most:
                found.append((least, here))
                continue
            middle = (least + most + 1) // 2
            on = here & self._of.get(keys[middle - 1], 0)
            if on:
                open_.append((middle, most, on))
            if on != here:
                open_.append((least, middle - 1, here ^ on))
        return self._by_worker(found, workers)

    def unbroken(self, keys: Iterable[bytes], workers: Sequence[Hashable]) -> list[int]:
        """Return the same where workers may hold blocks without those before them; looks at one block after the other.

        Takes no more of `keys` than one behind the last that somebody holds.
        """
        here, found, count = self._everyone(), [], 0
        for key in keys if here else ():
            on = here & self._of.get(key, 0)
            if on != here:
                found.append((count, here ^ on))
            here = on
            if not here:
                break
            count += 1
        return self._by_worker([*found, (count, here)], workers)

    def _everyone(self) -> int:
        return (1 << (len(self._places) + len(self._free))) - 1

    def _by_worker(self, found: Iterable[tuple[int, int]], workers: Sequence[Hashable]) -> list[int]:
        """Return the count of each worker from counts and the workers that have them."""
        places = len(self._places) + len(self._free)
        counts = np.zeros(places + 1, np.int64)  # the last one is of those who hold nothing
        for count, here in found:
            if not count:
                continue
            if here.bit_count() <= _FEW:
                while here:
                    first = here & -here
                    counts[first.bit_length() - 1] = count
                    here ^= first
            else:
                bits = np.frombuffer(here.to_bytes(places // 8 + 1, "little"), np.uint8)
                counts[:-1][np.unpackbits(bits, bitorder="little", count=places).view(bool)] = count
        listed, place = counts.tolist(), self._places
        return [listed[place.get(worker, -1)] for worker in workers]
