"""Requests that failed in the runner: by generation, because steps in flight may be of the residency before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fd_core.types import IntArray

__all__ = ["FailedRequests"]


class FailedRequests:
    """Why requests failed, by slot and generation."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[int, int], str] = {}

    def __bool__(self) -> bool:
        """Whether any step may still have to tell of a failure."""
        return bool(self._reasons)

    def add(self, slot: int, gen: int, reason: str) -> None:
        """The request that holds a slot in a generation failed."""
        self._reasons[slot, gen] = reason

    def clear(self, slot: int, gen: int) -> None:
        """A residency begins."""
        self._reasons.pop((slot, gen), None)

    def healthy(self, slots: IntArray, gens: IntArray) -> npt.NDArray[np.bool_]:
        """Return bool[n]: which requests, in `slots` int32[n] with generations `gens` int32[n], did not fail."""
        keys = zip(slots.tolist(), gens.tolist(), strict=True)
        return np.array([key not in self._reasons for key in keys], np.bool_)

    def of_step(self, slots: IntArray, gens: IntArray) -> tuple[tuple[int, str], ...]:
        """Return (slot, reason) of the failed ones among `slots`, which a step computes as generations `gens`.

        Both are int32[n] and int32[max_num_seqs]. Steps are asked for in order, so what is older is forgotten.
        """
        if not self._reasons:
            return ()
        self._reasons = {(slot, gen): why for (slot, gen), why in self._reasons.items() if gen >= gens[slot]}
        keys = ((slot, int(gens[slot])) for slot in slots.tolist())
        return tuple((key[0], self._reasons[key]) for key in keys if key in self._reasons)
