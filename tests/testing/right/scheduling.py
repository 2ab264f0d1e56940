"""Correct schedulers that differ from those of the core."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fd_core.config.envelope import OperatingEnvelope
from fd_core.errors import ConfigError
from fd_core.scheduling.contract import Scheduler
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler

_ROWS = ("slots", "gens", "starts", "num_tokens", "num_drafts", "samples")


class TakesTheLastSlot(ContinuousBatchingScheduler):
    """Takes the last free slot, returns rows and results in another order, and cannot be paused."""

    pause, resume = Scheduler.pause, Scheduler.resume
    forget_prefixes, change_weights = Scheduler.forget_prefixes, Scheduler.change_weights

    def __init__(self, setup):
        super().__init__(setup)
        slots = self._slots
        slots.free_slot = lambda: max(np.flatnonzero(~slots.occupied).tolist(), default=None)

    def plan(self):
        plan, effects = super().plan()
        if plan is None:
            return plan, effects
        rows = {name: getattr(plan, name)[::-1].copy() for name in _ROWS}
        for column in rows.values():
            column.flags.writeable = False
        return replace(plan, **rows), effects

    def commit(self, plan, output):
        deltas, effects = super().commit(plan, output)
        return deltas[::-1], effects

    def request_ids(self):
        return super().request_ids()[::-1]


class HasOneSlot(ContinuousBatchingScheduler):
    envelope = OperatingEnvelope(max_num_seqs=1)

    def __init__(self, setup):
        if setup.limits.max_num_seqs > 1:
            raise ConfigError("it has one slot", field="--max-num-seqs")
        super().__init__(setup)


class AdmitsBatches(ContinuousBatchingScheduler):
    """Requests enter together, when the last one before them has left."""

    def admit(self, builder, step):
        held = self.held()
        if not held.loading + held.running + held.draining:
            super().admit(builder, step)
