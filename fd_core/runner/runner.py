"""The runner template: one step on the device, the same for every backend."""

from __future__ import annotations

import time

import numpy as np

from fd_core.backends.contract import LoadProgress, Model
from fd_core.config import Limits
from fd_core.ops.contract import Array, Ops
from fd_core.runner.batch import PersistentBatch
from fd_core.runner.drafting import Drafter
from fd_core.runner.inputs import Rows, build_inputs, resolve_rows
from fd_core.runner.sampling import Sampler, Scores
from fd_core.runner.warmup import warm_up_plans
from fd_core.types import IntArray, LogprobRows, StepOutput, StepPlan

__all__ = ["Runner"]


class Runner:
    """Executes plans in order and answers each with exactly one output.

    A vendor supplies the `Ops`; batch, input building, sampling, verification of drafts, post-processing and the
    transfer to the host are here.
    """

    def __init__(self, ops: Ops, model: Model, limits: Limits, drafter: Drafter | None = None) -> None:
        self.limits = limits
        self._drafter = drafter
        self._ops = ops
        ops.configure(limits)
        self.cache = ops.allocate_kv(model.kv_shape(limits.block_size), limits.num_kv_blocks)
        if drafter is not None:
            drafter.allocate(limits)
        self._forward = ops.compile(model.forward)
        self._batch = PersistentBatch(limits)
        self._sampler = Sampler(ops, limits.max_num_seqs, model.vocab_size)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute one step.

        A plan whose whole batch was taken back computes nothing and still yields an output.
        """
        self._apply(plan)
        rows = resolve_rows(plan, self._batch, self.limits, self._ops.padded_rows)
        sampled, scores = self._sample(rows)
        accepted = self._verify(rows, sampled)
        tokens, kept, logprobs = self._to_host(plan, rows, sampled, accepted, scores)
        self._remember(rows, tokens, kept)
        ready = None if self._drafter is None else self._batch.num_drafts.copy()
        return StepOutput(plan.epoch, plan.step, tokens, self._batch.gen.copy(), ready, logprobs)

    def warm_up(self, progress: LoadProgress) -> float:
        """Run the largest prefill and one decode on the first slot, so that the first request pays for nothing.

        Returns the seconds that a token of the prefill took, cold as it was.
        """
        limits = self.limits
        length = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
        plans = warm_up_plans(length, limits.block_size)
        seconds = []
        for done, plan in enumerate(plans):
            progress(done, len(plans))
            begun = time.perf_counter()
            self.execute(plan)
            seconds.append(time.perf_counter() - begun)
        progress(len(plans), len(plans))
        self._batch = PersistentBatch(limits)
        return seconds[0] / length

    def _apply(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._batch.admit(admission)
            self._sampler.admit(admission)
            if self._drafter is not None:
                self._drafter.admit(admission.slot, admission.token_ids)
        self._batch.grant(plan)

    def _sample(self, rows: Rows) -> tuple[Array, Scores | None]:
        """Run the model and choose tokens int32[N, 1 + k] for the N rows that sample; unused cells mean nothing."""
        ops, width = self._ops, self.limits.max_drafts + 1
        empty = ops.from_host(np.empty((0, width), np.int32))
        if not len(rows.slots):
            return empty, None
        batch = self._batch
        size, spare = self.limits.block_size, self.cache.spare_block
        inputs = build_inputs(rows, batch.tokens, batch.tables, size, ops, spare)
        logits = self._forward(inputs, self.cache)
        if not len(rows.sampling):
            return empty, None
        tokens, scores = self._sampler.sample(logits, rows.logits_slots, rows.positions, rows.columns, batch.tokens)
        if width == 1:
            return tokens.reshape(-1, 1), scores
        firsts = np.cumsum(rows.drafts + 1) - (rows.drafts + 1)
        cells = firsts[:, None] + np.minimum(np.arange(width), rows.drafts[:, None])
        grid = ops.gather_rows(tokens, ops.from_host(cells.reshape(-1).astype(np.int32)))
        return grid.reshape(-1, width), scores

    def _verify(self, rows: Rows, sampled: Array) -> Array:
        """Count the drafts int32[N] that each sampling row keeps."""
        ops, batch, width = self._ops, self._batch, self.limits.max_drafts
        if not rows.drafts.any():
            return ops.from_host(np.zeros(len(rows.sampling), np.int32))
        slots = rows.slots[rows.sampling]
        places = np.minimum(batch.length[slots][:, None] + np.arange(width), batch.tokens.shape[1] - 1)
        drafts = batch.tokens[slots[:, None], places]
        return ops.verify(sampled, ops.from_host(drafts), ops.from_host(rows.drafts))

    def _to_host(
        self, plan: StepPlan, rows: Rows, sampled: Array, accepted: Array, scores: Scores | None
    ) -> tuple[IntArray, IntArray, LogprobRows | None]:
        """Build the token matrix int32[max_num_seqs, 1 + k] on the device and bring everything over: the one place
        of a step that waits for the device. Returns it, the drafts kept int32[N], and log-probabilities."""
        ops = self._ops
        slots = ops.from_host(rows.slots[rows.sampling])
        taken_back = ops.from_host(np.array([back.slot for back in plan.revocations], np.int32))
        matrix = ops.postprocess(sampled, accepted, slots, taken_back, self.limits.max_num_seqs)
        tokens, kept, *logprobs = ops.fetch([matrix, accepted, *(() if scores is None else scores.arrays)])
        return tokens, kept, None if scores is None else scores.on_host(*logprobs)

    def _remember(self, rows: Rows, tokens: IntArray, accepted: IntArray) -> None:
        """Append what was delivered, and guess what comes next."""
        slots = rows.slots[rows.sampling]
        self._batch.append(slots, tokens[slots], accepted)
        self._sampler.extend(slots, tokens[slots], accepted)
        if self._drafter is None or not len(slots):
            return
        self._drafter.extend(slots, tokens[slots], accepted + 1)
        self._batch.guess(slots, *self._drafter.propose(slots, self.limits.max_drafts))
