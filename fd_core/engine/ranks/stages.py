"""Stages of one model: ranks that compute some of its layers each, and different steps at the same time.

    rank 1, the first layers   | step 0 | step 1 | step 2 | . . .      sends the states of a step
    rank 0, the last layers             | step 0 | step 1 | . . .      samples, and sends the outcome

Rank 0 announces plans when they are submitted. A stage begins a plan once it has the tokens of all its rows, so texts
never depend on what is planned when. Stages work at the same time if the plans in flight have different requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fd_core.backends.contract import LoadProgress, Model
from fd_core.engine.ranks.leading import LeadingRunner, RankProcesses
from fd_core.engine.ranks.messages import RankOrder, StageOutcome, StagePlan, encode_order
from fd_core.errors import ConfigError
from fd_core.ops.contract import Array, Forward, KVCache, Ops, StepInput
from fd_core.ops.parallel import SLOT_BYTES, RankGroup, SharedMemoryGroup
from fd_core.runner.inputs.inputs import gather_inputs, resolve_rows, uploaded
from fd_core.runner.runner import Runner
from fd_core.types import StepOutput, StepPlan


class LastStageRunner(LeadingRunner):
    """The runner of rank 0: it computes the last layers and all that follows them."""

    def __init__(self, ranks: RankProcesses, layers: Sequence[tuple[int, int]], *parts: Any) -> None:
        """`layers` are those of each rank, from rank 0 on; `parts` the arguments of a `Runner`."""
        self._group = shared_memory(ranks.group)
        super().__init__(ranks, layers, *parts, axis=1)
        model, limits = parts[1], parts[2]
        if 4 * model.state_size * limits.max_num_batched_tokens > SLOT_BYTES:
            raise ConfigError(
                f"the states of a step of {limits.max_num_batched_tokens} tokens exceed the shared memory between "
                "stages",
                field="--max-num-batched-tokens",
                hint=f"use at most {SLOT_BYTES // (4 * model.state_size)}",
            )

    def _compile(self, model: Model) -> None:
        super()._compile(model)
        continued = partial(_continued, group=self._group, ops=self.ops, model=model)
        self._forward, self._states = continued(self._forward), continued(self._states)

    def announce(self, plan: StepPlan) -> None:
        """Send a plan to the other stages."""
        self.ranks.broadcast(encode_order(StagePlan(plan)))

    def warm_up(self, progress: LoadProgress) -> float:
        """Warm up with the other stages."""
        with self.ranks.fail_together():
            return Runner.warm_up(self, progress)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Finish a step that the other stages began. Raises `EngineDead` if they diverge."""
        with self.ranks.fail_together():
            output = Runner.execute(self, plan)
            self.ranks.broadcast(encode_order(StageOutcome(*self.batch.latest(plan.slots[plan.samples]))))
        return output


class EarlierStageRunner(Runner):
    """The runner of a stage before the last: it sends states to the next stage, and receives the sampled tokens."""

    def __init__(self, group: SharedMemoryGroup, *parts: Any) -> None:
        """`parts` are the arguments of a `Runner`."""
        self._group = group
        super().__init__(*parts)
        self._plans: deque[StepPlan] = deque()
        """Plans that were announced and not begun."""
        self._begun = self._known = 0
        """Numbers of plans begun, and of plans with a known outcome."""
        self._sampled = np.zeros(self.limits.max_num_seqs, np.int64)
        """For each slot, the last of the begun plans that sampled a token of it, counted from 1."""

    def _compile(self, model: Model) -> None:
        super()._compile(model)
        if not self.ops.stage.first:
            self._forward = _continued(self._forward, self._group, self.ops, model)

    def receive(self, order: RankOrder) -> None:
        """Process a message of rank 0, and compute the plans that are ready."""
        match order:
            case StagePlan(plan):
                self._plans.append(plan)
            case StageOutcome(slots, gens, lengths, num_drafts, tokens):
                self.batch.correct(slots, gens, lengths, num_drafts=num_drafts, tokens=tokens)
                self._known += 1
        while self._plans and (self._sampled[self._plans[0].slots] <= self._known).all():
            self._begin(self._plans.popleft())

    def _begin(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self.batch.admit(admission)
        if self.images is not None:
            self.images.begin(plan)
        self.batch.grant(plan)
        rows = resolve_rows(plan, self.batch, self.limits, padded=self.ops.padded)
        if len(rows.slots):
            size, spare = self.limits.block_size, self.cache.spare_block
            inputs = uploaded(gather_inputs(rows, self.batch.tokens, self.batch.tables, size, spare), self.ops)
            if self.images is not None:
                inputs = self.images.embedded(rows, rows.begins, inputs)
            self._group.pass_on(self.ops.to_host(self._forward(inputs, self.cache)))
        self._begun += 1
        self._sampled[plan.slots[plan.samples]] = self._begun


def shared_memory(group: RankGroup) -> SharedMemoryGroup:
    """Return the group of stages; `require_ranks` has excluded any other kind."""
    if not isinstance(group, SharedMemoryGroup):
        raise TypeError("stages require shared memory")
    return group


def _continued(forward: Forward, group: SharedMemoryGroup, ops: Ops, model: Model) -> Forward:
    """Return a forward that begins where the stage before ended."""

    def run(step: StepInput, cache: KVCache) -> Array:
        states = group.take((len(step.token_ids), model.state_size))
        return forward(replace(step, states=ops.states_from_host(states)), cache)

    return run
