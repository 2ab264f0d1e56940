"""Victim policies: who is taken back when blocks run out.

Pure, as scheduling policies are. Plugins offer their own through `fd_core.hookspecs.fd_register_victim_policies`.
"""

from __future__ import annotations

import abc

import numpy as np
import numpy.typing as npt

from fd_core.scheduling.slots import SlotTable

__all__ = ["Cheapest", "VictimPolicy", "Youngest"]


class VictimPolicy(abc.ABC):
    """Chooses one of several running slots."""

    name: str

    @abc.abstractmethod
    def choose(self, slots: SlotTable, candidates: npt.NDArray[np.intp]) -> int:
        """Return which of the running slots `candidates`, at least one, is taken back."""


class Cheapest(VictimPolicy):
    """The request that is cheapest to bring back: the one with the fewest tokens to compute again.

    A request that came back and has not filled a block since is spared while there is another, so that nobody is sent
    to and fro without getting on. Of equals the youngest goes.
    """

    name = "cheapest"

    def choose(self, slots: SlotTable, candidates: npt.NDArray[np.intp]) -> int:
        """Spared last, then fewest tokens, then youngest."""
        since = slots.known[candidates] - slots.admitted_with[candidates]
        spared = slots.returned[candidates] & (since < slots.block_size)
        order = np.lexsort((-slots.arrival[candidates], slots.length[candidates], spared))
        return int(candidates[order[0]])


class Youngest(VictimPolicy):
    """The request that arrived last (LIFO); the oldest always gets on."""

    name = "youngest"

    def choose(self, slots: SlotTable, candidates: npt.NDArray[np.intp]) -> int:
        """The latest arrival."""
        return int(candidates[np.argmax(slots.arrival[candidates])])
