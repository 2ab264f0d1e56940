"""Scheduling policies: who is admitted first.

A policy is pure: it sees values and returns an order. Plugins offer their own through
`fd_core.hookspecs.fd_register_schedulers`.
"""

from __future__ import annotations

import abc

import numpy as np
import numpy.typing as npt

from fd_core.scheduling.requests import Request
from fd_core.scheduling.slots import SlotTable

__all__ = ["FairShare", "Fcfs", "Policy", "Priority"]

Rank = tuple[int, ...]


class Policy(abc.ABC):
    """Orders waiting requests, and says who may not be taken back while others can."""

    name: str

    @abc.abstractmethod
    def rank(self, request: Request) -> Rank:
        """Return the sort key of a request that arrives; the smallest is admitted first.

        Asked once for each request: a preempted one keeps its rank, and with it its place before everything younger.
        """

    def admitted(self, request: Request, rank: Rank) -> None:  # noqa: B027 - most policies need not know
        """A request of this rank was admitted."""

    def expendable(self, slots: SlotTable, candidates: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return those of the running slots `candidates` among which a victim is sought, at least one."""
        return candidates


class Fcfs(Policy):
    """First come, first served."""

    name = "fcfs"

    def rank(self, request: Request) -> Rank:
        """Order of arrival."""
        return (request.arrival,)


class Priority(Policy):
    """Lower `priority` first, then order of arrival; the least important are taken back first."""

    name = "priority"

    def rank(self, request: Request) -> Rank:
        """(priority, arrival)"""
        return (request.spec.priority, request.arrival)

    def expendable(self, slots: SlotTable, candidates: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """The slots of the largest priority value."""
        values = slots.priority[candidates]
        least: npt.NDArray[np.intp] = candidates[values == values.max()]
        return least


class FairShare(Policy):
    """An equal share of tokens for each tenant that asks, however many requests it sends.

    Start-time fair queuing (Goyal et al., 1996): a request starts where its tenant's previous one ends in virtual time,
    and not before the virtual time of the last admission; it is charged its prompt and the output it may ask for. A
    tenant that was idle saves nothing up, and no tenant waits longer than one request of every other.
    """

    name = "fair"

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}

    def rank(self, request: Request) -> Rank:
        """(start in virtual time, arrival)"""
        tenant = request.spec.tenant
        start = max(self._now, self._ends.get(tenant, 0))
        self._ends[tenant] = start + request.limit
        return (start, request.arrival)

    def admitted(self, request: Request, rank: Rank) -> None:
        """Virtual time is where the last admitted request starts; tenants that it has passed are forgotten."""
        if rank[0] > self._now:
            self._now = rank[0]
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}
