"""Small numbers for workers: whatever is kept of many workers at once has each of them at its place."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["Numbers", "Places"]

Numbers = npt.NDArray[np.int64]


class Places:
    """The place of each worker in arrays and in sets of bits, from the first question for it until `leave`."""

    def __init__(self) -> None:
        self._of: dict[Hashable, int] = {}
        self._free: list[int] = []
        """Places of workers that left, a heap: there are no more places than there were workers at one time."""

    def __len__(self) -> int:
        """Length of arrays in which every place has its own element."""
        return len(self._of) + len(self._free)

    def of(self, worker: Hashable) -> int:
        """Return the place of one worker."""
        place = self._of.get(worker)
        if place is None:
            place = heapq.heappop(self._free) if self._free else len(self._of)
            self._of[worker] = place
        return place

    def among(self, workers: Iterable[Hashable]) -> Numbers:
        """Return the places of several workers, shape [n]."""
        return np.array([*map(self.of, workers)], np.int64)

    def leave(self, worker: Hashable) -> None:
        """Give on the place of a worker of which nothing is kept any longer."""
        place = self._of.pop(worker, None)
        if place is not None:
            heapq.heappush(self._free, place)
