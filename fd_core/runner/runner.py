"""The runner template: one step on the device, the same for every backend."""

from __future__ import annotations

import numpy as np

from fd_core.backends.contract import LoadProgress, Model
from fd_core.config import Limits
from fd_core.ops.contract import Array, Ops
from fd_core.runner.batch import PersistentBatch
from fd_core.runner.inputs import build_inputs
from fd_core.runner.sampling import Sampler
from fd_core.runner.warmup import warm_up_plans
from fd_core.types import IntArray, LogprobRows, StepOutput, StepPlan

__all__ = ["Runner"]


class Runner:
    """Executes plans in order and answers each with exactly one output.

    A vendor supplies the `Ops`; batch, input building, sampling, post-processing and the one transfer to the host
    are here.
    """

    def __init__(self, ops: Ops, model: Model, limits: Limits) -> None:
        self.limits = limits
        self._ops = ops
        self._cache = ops.allocate_kv(model.kv_shape(limits.block_size), limits.num_kv_blocks)
        self._forward = ops.compile(model.forward)
        self._batch = PersistentBatch(limits)
        self._sampler = Sampler(limits.max_num_seqs, model.vocab_size)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute one step.

        A plan whose whole batch was taken back computes nothing and still yields an output.
        """
        self._apply(plan)
        sampled, logprobs = self._compute(plan)
        slots = plan.slots[plan.samples]
        accepted = np.zeros(len(slots), np.int32)
        taken_back = np.array([back.slot for back in plan.take_backs], np.int32)
        ops = self._ops
        matrix = ops.postprocess(
            sampled, ops.from_host(accepted), ops.from_host(slots), ops.from_host(taken_back), self.limits.max_num_seqs
        )
        tokens: IntArray = ops.to_host(matrix)
        self._batch.append(slots, tokens[slots], accepted)
        return StepOutput(plan.epoch, plan.step, tokens, self._batch.gen.copy(), logprobs)

    def warm_up(self, progress: LoadProgress) -> None:
        """Run the largest prefill and one decode on the first slot, so that the first request pays for nothing."""
        limits = self.limits
        length = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
        plans = warm_up_plans(length, limits.block_size)
        for done, plan in enumerate(plans):
            progress(done, len(plans))
            self.execute(plan)
        progress(len(plans), len(plans))
        self._batch = PersistentBatch(limits)

    def _apply(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._batch.admit(admission)
            self._sampler.admit(admission)
        self._batch.grant(plan)

    def _compute(self, plan: StepPlan) -> tuple[Array, LogprobRows | None]:
        """Return sampled tokens int32[R, 1] of the rows that yield one, and their log-probabilities."""
        ops = self._ops
        if not len(plan.slots):
            return ops.from_host(np.empty((0, 1), np.int32)), None
        inputs = build_inputs(plan, self._batch, self.limits, ops)
        logits = self._forward(inputs, self._cache)
        slots = plan.slots[plan.samples]
        if not len(slots):
            return ops.from_host(np.empty((0, 1), np.int32)), None
        tokens, logprobs = self._sampler.sample(ops, logits, slots, self._batch.length[slots], self._batch.tokens)
        return tokens.reshape(-1, 1), logprobs
