"""The scheduler under test, found as a user would find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fd_core.scheduling.contract import SchedulerHoldings, SchedulerSetup
from fd_core.scheduling.scheduler import Scheduler

__all__ = ["SchedulerTarget", "find_scheduler"]


@dataclass(frozen=True)
class SchedulerTarget:
    """One scheduler under a name."""

    name: str
    make: Callable[[SchedulerSetup], Any]
    limits: Mapping[str, str] = field(default_factory=dict)
    """What it says that it lacks, with reasons."""


class _Continuous(Scheduler):
    """The built-in scheduler, made from a setup."""

    def __init__(self, setup: SchedulerSetup) -> None:
        super().__init__(
            setup.limits,
            setup.policy,
            setup.victims,
            setup.hasher,
            drafts=setup.drafts,
            keep_kv=setup.keep_kv,
            paired=setup.paired,
            kv_events=setup.kv_events,
            epoch=setup.epoch,
        )

    def held(self) -> SchedulerHoldings:
        """Return what is held."""
        stats = self.stats()
        slots, blocks = stats.slots, stats.blocks
        return SchedulerHoldings(
            waiting=slots.waiting,
            loading=slots.loading,
            running=slots.running,
            draining=slots.draining,
            owned=blocks.used,
            fenced=blocks.fenced,
            cached=blocks.cached,
            operations=int(self.probe().operations.busy),
        )


def find_scheduler(name: str) -> SchedulerTarget:
    """Return the scheduler called `name`."""
    return SchedulerTarget(name, _Continuous)
