"""Correct schedulers that differ from those of the core."""

from __future__ import annotations

import numpy as np

from fd_core.scheduling.contract import Scheduler
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler


class TakesTheLastSlot(ContinuousBatchingScheduler):
    """Takes the last free slot, returns results in another order, and cannot be paused."""

    pause, resume = Scheduler.pause, Scheduler.resume
    forget_prefixes, change_weights = Scheduler.forget_prefixes, Scheduler.change_weights

    def __init__(self, setup):
        super().__init__(setup)
        slots = self._slots
        slots.free_slot = lambda: max(np.flatnonzero(~slots.occupied).tolist(), default=None)

    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        return deltas[::-1], effects

    def request_ids(self):
        return super().request_ids()[::-1]
