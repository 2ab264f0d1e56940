"""Scheduling policies: who is admitted first, who is taken back first.

A policy is pure: it sees values and returns an order. Plugins offer their own through
`fd_core.hookspecs.fd_register_schedulers`.
"""

from __future__ import annotations

import abc

import numpy as np
import numpy.typing as npt

from fd_core.scheduling.requests import Request
from fd_core.scheduling.slots import SlotTable

__all__ = ["Fcfs", "Policy", "Priority"]


class Policy(abc.ABC):
    """Orders waiting requests and chooses victims."""

    name: str

    @abc.abstractmethod
    def rank(self, request: Request) -> tuple[int, ...]:
        """Return the sort key of a waiting request; the smallest is admitted first. It must not change later."""

    @abc.abstractmethod
    def victim(self, slots: SlotTable, candidates: npt.NDArray[np.intp]) -> int:
        """Return which of the running slots `candidates`, at least one, is taken back when blocks run out."""


class Fcfs(Policy):
    """First come, first served; the youngest stay is taken back first."""

    name = "fcfs"

    def rank(self, request: Request) -> tuple[int, ...]:
        """Order of arrival; a preempted request keeps its place, which is before everything younger."""
        return (request.arrival,)

    def victim(self, slots: SlotTable, candidates: npt.NDArray[np.intp]) -> int:
        """The request that arrived last."""
        return int(candidates[np.argmax(_arrivals(slots, candidates))])


class Priority(Policy):
    """Lower `priority` first, then order of arrival; the least important and youngest is taken back first."""

    name = "priority"

    def rank(self, request: Request) -> tuple[int, ...]:
        """(priority, arrival)"""
        return (request.spec.priority, request.arrival)

    def victim(self, slots: SlotTable, candidates: npt.NDArray[np.intp]) -> int:
        """The largest (priority, arrival)."""
        order = np.lexsort((_arrivals(slots, candidates), slots.priority[candidates]))
        return int(candidates[order[-1]])


def _arrivals(slots: SlotTable, candidates: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    return slots.arrival[candidates]
