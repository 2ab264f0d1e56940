"""The scheduler under test, found as a user would find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fd_core.plugins import SCHEDULER, installed_plugins
from fd_core.scheduling.contract import Scheduler, SchedulerSetup


@dataclass(frozen=True)
class SchedulerTarget:
    """One scheduler under a name."""

    name: str
    make: Callable[[SchedulerSetup], Scheduler]
    lacks: Mapping[str, str] = field(default_factory=dict)
    """What it does not do, with reasons."""


def find_scheduler(name: str) -> SchedulerTarget:
    """Return the scheduler called `name`. Raises `PluginError` if there is none, or if it cannot be imported."""
    found = installed_plugins().load(SCHEDULER, name)
    return SchedulerTarget(name, found, found.lacks)
