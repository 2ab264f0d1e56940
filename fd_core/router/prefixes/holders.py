"""Which workers hold a block: for each block one number, in which each worker has a bit.

Each engine of a worker that has several is a worker here.

So a prompt is compared with what a thousand workers hold in a few operations a block, and not once for each worker.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import numpy as np

from fd_core.router.places import Numbers, Places

__all__ = ["Holders"]

_FEW: Final = 8
"""So many bits are looked at one by one."""


class Holders:
    """The blocks of every worker."""

    def __init__(self, places: Places) -> None:
        """`places` are of the bits; whoever gives one on discards the blocks of its worker before."""
        self._places = places
        self._of: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._of)

    def bit(self, worker: Hashable) -> int:
        """Return the number in which only this worker has its bit."""
        return 1 << self._places.of(worker)

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

    def leading(self, keys: Sequence[bytes]) -> Numbers:
        """Return how many leading blocks each worker holds, by place, given that none holds one without those before.

        Looks at the logarithm of the blocks for each place where workers part.
        """
        found: list[tuple[int, int]] = []
        first = self._of.get(keys[0], 0) if keys else 0
        open_ = [(1, len(keys), first)] if first else []
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
        return self._by_place(found)

    def unbroken(self, keys: Iterable[bytes]) -> Numbers:
        """Return the same where workers may hold blocks without those before them; looks at one block after the other.

        Takes no more of `keys` than one behind the last that somebody holds.
        """
        here, found, count = -1, [], 0
        for key in keys if self._of else ():
            on = here & self._of.get(key, 0)
            if count and on != here:
                found.append((count, here ^ on))
            here = on
            if not here:
                break
            count += 1
        return self._by_place([*found, (count, here)] if count else [])

    def _by_place(self, found: Iterable[tuple[int, int]]) -> Numbers:
        """Return the count of each place from counts and the places that have them."""
        places = len(self._places)
        counts = np.zeros(places, np.int64)
        for count, here in found:
            if here.bit_count() <= _FEW:
                while here:
                    first = here & -here
                    counts[first.bit_length() - 1] = count
                    here ^= first
            else:
                bits = np.frombuffer(here.to_bytes(places // 8 + 1, "little"), np.uint8)
                counts[np.unpackbits(bits, bitorder="little", count=places).view(bool)] = count
        return counts
