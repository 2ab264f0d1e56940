"""Victim policies: which running request is preempted when KV blocks run out.

Pure, as scheduling policies are. Plugins register their own through `fd_core.hookspecs.fd_register_victim_policies`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fd_core.types import IntArray

__all__ = ["FewestTokens", "LatestArrival", "RunningRequests", "VictimPolicy"]


@dataclass(frozen=True, slots=True)
class RunningRequests:
    """Running requests, one per row: all for `preemption_candidates`, and the candidates for a victim policy."""

    slots: npt.NDArray[np.intp]
    """intp[n]: distinct numbers, unrelated to the requests."""
    arrivals: npt.NDArray[np.int64]
    """int64[n]: order of arrival; the largest is the youngest."""
    priorities: npt.NDArray[np.int64]
    """int64[n]: lower values are more important."""
    num_tokens: IntArray
    """int32[n]: tokens to recompute if the request is preempted and none of its KV is stored."""
    num_gained: IntArray
    """int32[n]: tokens delivered since the request was admitted to its slot."""
    preempted_before: npt.NDArray[np.bool_]
    """bool[n]"""
    block_size: int
    """Tokens in a KV block."""

    def only(self, rows: npt.NDArray[np.intp]) -> RunningRequests:
        """Return some of the rows."""
        return RunningRequests(
            self.slots[rows],
            self.arrivals[rows],
            self.priorities[rows],
            num_tokens=self.num_tokens[rows],
            num_gained=self.num_gained[rows],
            preempted_before=self.preempted_before[rows],
            block_size=self.block_size,
        )


class VictimPolicy(abc.ABC):
    """Chooses one of several running requests."""

    name: str

    @abc.abstractmethod
    def choose(self, running: RunningRequests) -> int:
        """Return the row of `running`, which has at least one, to preempt.

        The choice depends on these requests alone, and takes little of the time of a step. A request that is chosen
        would be chosen as well if it were less important.
        """


class FewestTokens(VictimPolicy):
    """The request that is cheapest to resume: the one with the fewest tokens to recompute.

    A request that was preempted before and has not filled a block since is spared while there is another request, so
    that no request is preempted repeatedly without progress. Ties go to the youngest.
    """

    name = "cheapest"

    def choose(self, running: RunningRequests) -> int:
        """Order by: not spared, then the fewest tokens, then the youngest."""
        spared = running.preempted_before & (running.num_gained < running.block_size)
        return int(np.lexsort((-running.arrivals, running.num_tokens, spared))[0])


class LatestArrival(VictimPolicy):
    """The request that arrived last (LIFO); the oldest request always makes progress."""

    name = "youngest"

    def choose(self, running: RunningRequests) -> int:
        """Return the latest arrival."""
        return int(np.argmax(running.arrivals))
