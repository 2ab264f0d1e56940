"""Requests that failed in the runner: by generation, because steps in flight may be of the residency before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fd_core.types import IntArray


class FailedRequests:
    """Why requests failed, by slot and generation."""

    def __init__(self) -> None:
        self.reasons: dict[tuple[int, int], str] = {}
        """Empty most of the time, when no step has to tell of a failure."""

    def add(self, slot: int, gen: int, reason: str) -> None:
        """The request that holds a slot in a generation failed."""
        self.reasons[slot, gen] = reason

    def healthy(self, slots: IntArray, gens: IntArray) -> npt.NDArray[np.bool_]:
        """Return bool[n]: which requests, in `slots` int32[n] with generations `gens` int32[n], did not fail."""
        keys = zip(slots.tolist(), gens.tolist(), strict=True)
        return np.array([key not in self.reasons for key in keys], np.bool_)

    def of_step(self, slots: IntArray, gens: IntArray) -> tuple[tuple[int, str], ...]:
        """Return (slot, reason) of the failed ones among `slots`, which a step computes as generations `gens`.

        Both are int32[n] and int32[max_num_seqs]. Steps are asked for in order, so what is older is forgotten.
        """
        self.reasons = {(slot, gen): why for (slot, gen), why in self.reasons.items() if gen >= gens[slot]}
        keys = ((slot, int(gens[slot])) for slot in slots.tolist())
        return tuple((key[0], self.reasons[key]) for key in keys if key in self.reasons)
