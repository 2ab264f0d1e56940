"""Built-in schedulers and policies, registered through the same hooks as those of plugins."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_schedulers() -> list[Entry]:
    """Offer `continuous`."""
    target = "fd_core.scheduling.scheduler:ContinuousBatchingScheduler"
    return [Entry("continuous", target, "requests enter and leave the batch at any step")]


@hookimpl
def fd_register_scheduling_policies() -> list[Entry]:
    """Offer `fcfs`, `priority` and `fair`."""
    return [
        Entry("fcfs", "fd_core.scheduling.policies:Fcfs", "first come, first served"),
        Entry("priority", "fd_core.scheduling.policies:Priority", "lower `priority` first, then order of arrival"),
        Entry("fair", "fd_core.scheduling.policies:FairShare", "equal shares of tokens for all active tenants"),
    ]


@hookimpl
def fd_register_victim_policies() -> list[Entry]:
    """Offer `cheapest` and `youngest`."""
    return [
        Entry("cheapest", "fd_core.scheduling.victims:FewestTokens", "fewest tokens to recompute"),
        Entry("youngest", "fd_core.scheduling.victims:LatestArrival", "the request that arrived last (LIFO)"),
    ]
