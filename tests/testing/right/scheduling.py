"""Correct schedulers that differ from those of the core."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fd_core.config.envelope import OperatingEnvelope
from fd_core.effects.operations import CompileGrammar, GrammarReady
from fd_core.errors import ConfigError
from fd_core.scheduling.contract import Scheduler
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.testing.schedulers.day import SERVERS

SHORT_DAY = replace(SERVERS["crowded"], conversations=10, seconds=2.5)
"""Has the checks of whole days, which `nox -s soak` lives for a minute each."""
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


class CompilesAGrammarOnce(ContinuousBatchingScheduler):
    """Requests with one grammar wait for one compilation, which ends early when none of them waits any more."""

    def __init__(self, setup):
        super().__init__(setup)
        operations = self._operations
        self._begin, self._cancel = operations.begin, operations.cancel
        operations.begin, operations.cancel = self._begun, self._cancelled

    def _begun(self, effect, request, blocks=None):
        grammar = getattr(effect, "grammar", None)
        for number, (other, owner, _) in self._operations.open.items() if grammar else ():
            if owner is not None and getattr(other, "grammar", None) == grammar:
                return number
        return self._begin(effect, request, blocks)

    def _cancelled(self, number):
        effect, owner, _ = self._operations.open.get(number, (None, None, None))
        others = [each for each in self._waiting_for(number) if each is not owner]
        if not (isinstance(effect, CompileGrammar) and len(others) + (owner is not None) > 1):
            self._cancel(number)
        elif owner.abort_requested:
            self._operations.open[number] = effect, others[0], None

    def _waiting_for(self, number):
        return [each for each in self._requests.values() if number is not None and each.compiling == number]

    def complete(self, completion):
        if isinstance(completion, GrammarReady):
            for each in self._waiting_for(completion.operation):
                each.compiling = None
        return super().complete(completion)


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
