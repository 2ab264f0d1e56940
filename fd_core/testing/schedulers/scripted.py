"""A scheduler with scripted tokens and without an audit, for many steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fd_core.effects.operations import CompileGrammar, Effect, Found, GrammarReady, Lookup, Save, Saved
from fd_core.scheduling.contract import Scheduler, SchedulerSetup
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import VictimPolicy
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID
from fd_core.testing.models.small import small_limits
from fd_core.types import Delta, StepOutput, StepPlan


class ScriptedRun:
    """Plans and commits steps whose rows all yield the token `step % 251`."""

    def __init__(self, make: Callable[[SchedulerSetup], Scheduler], setup: SchedulerSetup) -> None:
        self.scheduler = make(setup)
        self._limits = setup.limits
        self._gens = np.zeros(setup.limits.max_num_seqs, np.int32)
        self.compiling: list[int] = []
        """Open operations that compile grammars."""
        self.looked_up = 0
        """Blocks of all lookups."""

    def step(self) -> tuple[StepPlan | None, list[Delta]]:
        """Plan a step and commit its output; operations end at once, without anything stored."""
        plan = self.plan()
        return plan, [] if plan is None else self.commit(plan)

    def plan(self) -> StepPlan | None:
        """Plan a step."""
        plan, effects = self.scheduler.plan()
        self.perform(effects.operations)
        return plan

    def commit(self, plan: StepPlan) -> list[Delta]:
        """Commit the output of a plan."""
        deltas, effects = self.scheduler.commit(plan, self.output(plan))
        self.perform(effects.operations)
        return deltas

    def output(self, plan: StepPlan) -> StepOutput:
        """Return the output of a plan."""
        for admission in plan.admissions:
            self._gens[admission.slot] = admission.gen
        tokens = np.full((self._limits.max_num_seqs, 1), EMPTY_TOKEN_ID, np.int32)
        tokens[plan.slots[plan.samples], 0] = plan.step % 251
        for revoked in plan.revocations:
            tokens[revoked.slot, 0] = PREEMPTED_TOKEN_ID
        return StepOutput(plan.epoch, plan.step, tokens, self._gens.copy())

    def perform(self, effects: Sequence[Effect]) -> None:
        """End saves and lookups at once; grammars stay open."""
        for effect in effects:
            if isinstance(effect, Save):
                self.scheduler.complete(Saved(effect.operation, 0))
            elif isinstance(effect, Lookup):
                self.looked_up += len(effect.keys)
                self.scheduler.complete(Found(effect.operation, 0, 0))
            elif isinstance(effect, CompileGrammar):
                self.compiling.append(effect.operation)

    def compiled(self) -> None:
        """End the compilation that began last."""
        self.scheduler.complete(GrammarReady(self.compiling.pop()))


def scripted_core(policy: SchedulingPolicy, victims: VictimPolicy, **sizes: int) -> ScriptedRun:
    """Return a run of the core's scheduler with these policies, six slots, and other sizes."""
    limits = small_limits(max_num_seqs=6, max_num_batched_tokens=64, **sizes)
    return ScriptedRun(ContinuousBatchingScheduler, SchedulerSetup(limits=limits, policy=policy, victims=victims))


class CountedInt(int):
    """A number whose comparisons run bytecode, so that those in `min`, `sort` and heaps are counted, too."""

    def __lt__(self, other: object) -> bool:
        return int.__lt__(self, other) if isinstance(other, int) else NotImplemented

    def __eq__(self, other: object) -> bool:
        return int.__eq__(self, other) if isinstance(other, int) else NotImplemented

    __hash__ = int.__hash__
