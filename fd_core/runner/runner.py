"""The runner template: one step on the device, the same for every backend."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from fd_core.backends.contract import LoadProgress, Model, cache_shape
from fd_core.config import Limits
from fd_core.metrics import snapshot
from fd_core.ops.contract import Array, Ops, StepInput
from fd_core.runner.adapters import RunnerAdapters
from fd_core.runner.batch import PersistentBatch
from fd_core.runner.drafting import Drafter, SlotError
from fd_core.runner.inputs import Rows, build_inputs, resolve_rows
from fd_core.runner.pooling import PooledParts, Pooler
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.runner.prompt_scores import PromptScorer, PromptScores
from fd_core.runner.sampling import Sampled, Sampler
from fd_core.runner.slot_grammars import MaskStats, SlotGrammars
from fd_core.structured.compiler import GrammarCompiler, GrammarError
from fd_core.types import (
    Admission,
    BlockGrant,
    IntArray,
    LogprobRows,
    PooledRows,
    PromptLogprobRows,
    SamplingParams,
    StepOutput,
    StepPlan,
)

__all__ = ["Runner"]

_Readings = tuple[PromptScores | None, PooledParts | None]
"""What a step read from prompts, on the device."""


class Runner:
    """Executes plans in order and answers each with exactly one output.

    A vendor supplies the `Ops`, and a `Postprocess` where there is none for its framework; batch, input building,
    sampling, verification of drafts and the transfer to the host are here. `ops`, `batch`, `cache` and `drafter` are
    for audits and tests: who changes them may break every law.
    """

    def __init__(
        self,
        ops: Ops,
        model: Model,
        limits: Limits,
        postprocess: type[Postprocess],
        drafter: Drafter | None = None,
        grammars: GrammarCompiler | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        """`grammars` is None where structured output is switched off; `kv_cache_dtype` is one of `KVShape.dtype`."""
        self.limits = limits
        self.drafter = drafter
        self.ops = ops
        ops.configure(limits)
        self.cache = ops.allocate_kv(cache_shape(model, limits.block_size, kv_cache_dtype), limits.num_kv_blocks)
        if drafter is not None:
            drafter.allocate(limits)
        self._forward = ops.compile(model.forward)
        self._states = ops.compile_states(model.states)
        self._head = model.head
        self._watch: Callable[[StepInput], None] = lambda _: None
        self.adapters = RunnerAdapters(ops, model)
        """Changed between steps, on the thread that executes them."""
        self.batch = PersistentBatch(limits)
        self._sampler = Sampler(ops, limits.max_num_seqs, model.vocab_size)
        self._grammars = SlotGrammars(grammars, model.vocab_size)
        self._scorer = PromptScorer(ops, model.vocab_size)
        self._pooler = Pooler(ops)
        self._postprocess = postprocess(ops, limits)
        self._failed: dict[int, str] = {}
        """Why the request in a slot failed."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute one step.

        A plan whose whole batch was revoked computes nothing and still yields an output. A request whose own row fails
        stands in `StepOutput.errors` of this step and of each later one that computes it, until its slot is admitted
        anew; whatever else fails is raised.
        """
        self._apply(plan)
        rows = resolve_rows(plan, self.batch, self.limits, self.ops.padded)
        sampled, read = self._sample(rows)
        grid = self._grid(rows, sampled)
        accepted = self._verify(rows, grid)
        tokens, kept, peaks, logprobs, of_prompts = self._to_host(plan, rows, grid, accepted, sampled, read)
        self._look_for_failures(rows, kept, peaks)
        self._remember(rows, tokens, kept)
        ready = self.batch.num_drafts.copy() if self.drafter is not None or self._grammars else None
        errors = tuple((slot, self._failed[slot]) for slot in plan.slots.tolist() if slot in self._failed)
        return StepOutput(plan.epoch, plan.step, tokens, self.batch.gen.copy(), ready, logprobs, errors, *of_prompts)

    def mask_stats(self) -> MaskStats:
        """Return what grammars cost and spared so far."""
        return snapshot(self._grammars.stats)

    def warm_up(self, progress: LoadProgress) -> float:
        """Run a prefill, of `Ops.warm_up_tokens` if it says so, and a decode, so that no request pays for first times.

        Returns the seconds that a token of the prefill took, cold as it was.
        """
        limits = self.limits
        length = min(limits.max_num_batched_tokens, limits.max_model_len - 1, self.ops.warm_up_tokens or sys.maxsize)
        plans = _warm_up_plans(length, limits.block_size)
        seconds = []
        for done, plan in enumerate(plans):
            progress(done, len(plans))
            begun = time.perf_counter()
            self.announce(plan)
            self.execute(plan)
            seconds.append(time.perf_counter() - begun)
        progress(len(plans), len(plans))
        self.batch = PersistentBatch(limits)
        return seconds[0] / length

    def announce(self, plan: StepPlan) -> None:
        """Be told of a plan when it is submitted, on the thread that submits, while others may be executed."""

    def check(self) -> None:
        """Raise `EngineDead` if what computes beside this process is gone; called while nothing is executed."""

    def close(self) -> None:
        """End what computes beside this process."""

    def watch_forward(self, watch: Callable[[StepInput], None]) -> None:
        """Have `watch` called with the input of every forward pass from now on."""
        self._watch = watch

    def _apply(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._failed.pop(admission.slot, None)
            self.batch.admit(admission, self.adapters.place(admission.adapter))
            self._scorer.admit(admission)
            self._pooler.admit(admission)
            try:
                self._sampler.admit(admission)
            except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this request alone
                self._fail(admission.slot, f"its sampling parameters cannot be used: {error}")
            self._admit_grammar(admission)
            self._admit_to_drafter(admission.slot, admission.token_ids)
        self.batch.grant(plan)

    def _sample(self, rows: Rows) -> tuple[Sampled, _Readings]:
        """Run the model, choose a token from each of its rows of logits, and read what is wanted of prompts."""
        ops, batch = self.ops, self.batch
        masks = self._grammars.begin(rows, batch.tokens)
        read: _Readings = (None, None)
        if len(rows.slots):
            size, spare = self.limits.block_size, self.cache.spare_block
            adapters = self.adapters.of_step(batch.places, rows.slots)
            inputs = build_inputs(rows, batch.tokens, batch.tables, size, ops, spare, adapters)
            forward, states_of = (self._forward, self._states) if adapters is None else self.adapters.forwards
            scored, pooled = self._scorer.rows(rows), self._pooler.parts(rows)
            if len(scored[0]) or pooled:
                states, head = states_of(inputs, self.cache), self._head
                read = (
                    self._scorer.score(states, head, scored, batch.tokens) if len(scored[0]) else None,
                    self._pooler.pool(states, head, pooled) if pooled else None,
                )
                logits = head(ops.gather_rows(states, inputs.logits_rows)) if len(rows.sampling) else None
            else:
                self._watch(inputs)
                logits = forward(inputs, self.cache)
        if not len(rows.sampling):
            return Sampled(ops.from_host(np.empty(0, np.int32)), ops.from_host(np.empty(0, np.float32))), read
        allowed = None if masks is None else masks()
        sampler = self._sampler
        return sampler.sample(logits, rows.logits_slots, rows.positions, rows.columns, batch.tokens, allowed), read

    def _grid(self, rows: Rows, sampled: Sampled) -> Array:
        """Return the tokens int32[N, 1 + k] of the N rows that sample; unused cells mean nothing."""
        ops, width = self.ops, self.limits.max_drafts + 1
        if not len(rows.sampling):
            return ops.from_host(np.empty((0, width), np.int32))
        if width == 1:
            return sampled.tokens.reshape(-1, 1)
        grid = ops.gather_rows(sampled.tokens, ops.from_host(rows.cells(width).reshape(-1)))
        return grid.reshape(-1, width)

    def _verify(self, rows: Rows, sampled: Array) -> Array:
        """Count the drafts int32[N] that each sampling row keeps."""
        ops, batch, width = self.ops, self.batch, self.limits.max_drafts
        if not rows.drafts.any():
            return ops.from_host(np.zeros(len(rows.sampling), np.int32))
        slots = rows.slots[rows.sampling]
        places = np.minimum(batch.length[slots][:, None] + np.arange(width), batch.tokens.shape[1] - 1)
        drafts = batch.tokens[slots[:, None], places]
        return ops.verify(sampled, ops.from_host(drafts), ops.from_host(rows.drafts))

    def _to_host(
        self, plan: StepPlan, rows: Rows, grid: Array, accepted: Array, sampled: Sampled, read: _Readings
    ) -> tuple[
        IntArray,
        IntArray,
        npt.NDArray[np.float32],
        LogprobRows | None,
        tuple[PromptLogprobRows | None, PooledRows | None],
    ]:
        """Build the token matrix int32[max_num_seqs, 1 + k] on the device and bring everything over.

        The one place of a step that waits for the device. Returns the matrix, the drafts kept int32[N], the peaks
        float32[R], log-probabilities, and what was read from prompts.
        """
        ops = self.ops
        slots = ops.from_host(rows.slots[rows.sampling])
        revoked = ops.from_host(np.array([revocation.slot for revocation in plan.revocations], np.int32))
        matrix = self._postprocess.token_matrix(grid, accepted, slots, revoked)
        scores, pooled = read
        groups = (sampled.scores, () if scores is None else scores.parts, () if pooled is None else pooled.arrays)
        tokens, kept, peaks, *more = ops.fetch([matrix, accepted, sampled.peaks, *(each for g in groups for each in g)])
        found = iter(more)
        of_tokens, of_prompts, of_vectors = ([*islice(found, len(group))] for group in groups)
        scored = sampled.scored
        return (
            tokens,
            kept,
            peaks,
            LogprobRows(rows.logits_slots[scored], rows.columns[scored], *of_tokens) if of_tokens else None,
            (
                None if scores is None else scores.on_host(of_prompts),
                None if pooled is None else pooled.on_host(of_vectors),
            ),
        )

    def _look_for_failures(self, rows: Rows, accepted: IntArray, peaks: npt.NDArray[np.float32]) -> None:
        """Fail the requests of which a delivered token was chosen from logits that are not finite."""
        strange = ~np.isfinite(peaks)
        if not strange.any():
            return
        width = self.limits.max_drafts + 1
        failed = (strange[rows.cells(width)] & (np.arange(width) <= accepted[:, None])).any(axis=1)
        for slot in rows.slots[rows.sampling][failed].tolist():
            why = self._grammars.trouble(slot) or "of its logits one is NaN or inf, or all are -inf"
            self._fail(slot, f"no token can be chosen: {why}")

    def _remember(self, rows: Rows, tokens: IntArray, accepted: IntArray) -> None:
        """Append what was delivered, and guess what comes next."""
        slots, verified = rows.slots[rows.sampling], rows.drafts
        if self._failed:
            healthy = self._healthy(slots)
            slots, accepted, verified = slots[healthy], accepted[healthy], verified[healthy]
        delivered = tokens[slots]
        self.batch.append(slots, delivered, accepted)
        self._sampler.extend(slots, delivered, accepted)
        if self._grammars:
            for slot, message in self._grammars.extend(slots, delivered, verified, accepted):
                self._fail(slot, message)
            healthy = self._healthy(slots)
            slots, accepted, delivered = slots[healthy], accepted[healthy], delivered[healthy]
        if not len(slots):
            return
        if self.drafter is not None:
            self._draft(self.drafter, slots, delivered, accepted + 1)
        elif self._grammars and self.limits.max_drafts:
            some = self._grammars.among(slots)
            self._guess(some, np.zeros((len(some), self.limits.max_drafts), np.int32), np.zeros(len(some), np.int32))

    def _draft(self, drafter: Drafter, slots: IntArray, tokens: IntArray, counts: IntArray) -> None:
        """Let the drafter guess behind the delivered tokens; leaves out whom it fails for."""
        try:
            drafter.extend(slots, tokens, counts)
        except SlotError as error:
            self._fail_one_of(slots, error)
            # Which of the others it took in is not known, so it gets their whole texts.
            for slot in slots[self._healthy(slots)].tolist():
                self._admit_to_drafter(slot, self.batch.tokens[slot, : self.batch.length[slot]].copy())
        while len(slots := slots[self._healthy(slots)]):
            try:
                self._guess(slots, *drafter.propose(slots, self.limits.max_drafts))
            except SlotError as error:
                self._fail_one_of(slots, error)
            else:
                return

    def _guess(self, slots: IntArray, drafts: IntArray, counts: IntArray) -> None:
        """Place drafts int32[n, k], of which row i has counts[i], behind the texts of `slots`, as grammars allow."""
        if self._grammars:
            drafts, counts = drafts.copy(), counts.copy()
            self._grammars.shape_drafts(slots, drafts, counts)
        self.batch.guess(slots, drafts, counts)

    def _admit_grammar(self, admission: Admission) -> None:
        try:
            self._grammars.admit(admission)
        except GrammarError as error:
            self._fail(admission.slot, f"its grammar cannot be used: {error}")

    def _admit_to_drafter(self, slot: int, tokens: IntArray) -> None:
        if self.drafter is None:
            return
        try:
            self.drafter.admit(slot, tokens)
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this request alone
            self._fail(slot, f"the drafter {self.drafter.name} failed: {type(error).__name__}: {error}")

    def _healthy(self, slots: IntArray) -> npt.NDArray[np.bool_]:
        return np.array([slot not in self._failed for slot in slots.tolist()], np.bool_)

    def _fail_one_of(self, slots: IntArray, error: SlotError) -> None:
        if error.slot not in slots[self._healthy(slots)]:
            raise error
        self._fail(error.slot, str(error))

    def _fail(self, slot: int, message: str) -> None:
        self._grammars.drop(slot)
        self.batch.num_drafts[slot] = 0
        self._failed[slot] = message


def _warm_up_plans(length: int, block_size: int) -> tuple[StepPlan, StepPlan]:
    """Return a prefill of `length` tokens in slot 0 and one decode after it; blocks 0 and up are overwritten."""
    blocks = np.arange(-(-(length + 1) // block_size), dtype=np.int32)
    params = SamplingParams(temperature=0.0)
    zero = np.zeros(1, np.int32)
    prefill = StepPlan(
        epoch=0,
        step=0,
        slots=zero,
        gens=zero,
        starts=zero,
        num_tokens=np.full(1, length, np.int32),
        num_drafts=zero,
        samples=np.ones(1, np.bool_),
        admissions=(Admission(0, 0, np.zeros(length, np.int32), length, params, eos_token_ids=(), computed=0),),
        grants=(BlockGrant(0, 0, blocks),),
    )
    one = np.ones(1, np.int32)
    return prefill, replace(prefill, step=1, starts=prefill.num_tokens, num_tokens=one, admissions=(), grants=())
