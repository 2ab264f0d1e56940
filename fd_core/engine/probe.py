"""A view into an engine for audits and tests; the engine itself has no use for it."""

from __future__ import annotations

from dataclasses import dataclass

from fd_core.engine.device import Device
from fd_core.runner.runner import Runner
from fd_core.scheduling.scheduler import Scheduler

__all__ = ["EngineProbe"]


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """The parts of one engine as they are, not copies: whoever changes them may break every law."""

    scheduler: Scheduler
    device: Device
    watchdog_seconds: float

    @property
    def runner(self) -> Runner:
        """What the device runs."""
        return self.device.runner
