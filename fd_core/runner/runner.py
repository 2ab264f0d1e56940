"""The runner template: one step on the device, the same for every backend."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from fd_core.backends.contract import LoadProgress, Model, cache_shape
from fd_core.config import Limits
from fd_core.ops.contract import Array, Ops, StepInput
from fd_core.runner.batch import PersistentBatch
from fd_core.runner.drafting import Drafter, SlotError
from fd_core.runner.failures import FailedRequests
from fd_core.runner.inputs.inputs import Rows, gather_inputs, resolve_rows
from fd_core.runner.inputs.last_tokens import LastTokens
from fd_core.runner.inputs.uploading import uploaded
from fd_core.runner.launching import LaunchedStep, Readings, StepAnswer, StepWork, result_groups
from fd_core.runner.placed_adapters import RunnerAdapters
from fd_core.runner.pooling import Pooler
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.runner.sampling.grammars import Masks, MaskStats, SlotGrammars
from fd_core.runner.sampling.prompt_scores import PromptScorer
from fd_core.runner.sampling.sampler import Sampled, Sampler
from fd_core.runner.warm_up import warm_up_plans
from fd_core.structured.compiler import GrammarCompiler, GrammarError
from fd_core.types import (
    NO_CHOICE,
    NOT_FINITE,
    Admission,
    IntArray,
    StepOutput,
    StepPlan,
)
from fd_core.types.metrics import snapshot

__all__ = ["Runner"]


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
        self.adapters = RunnerAdapters(ops, model, self.cache)
        """Changed between steps, on the thread that executes them."""
        self.batch = PersistentBatch(limits)
        self._sampler = Sampler(ops, limits.max_num_seqs, model.vocab_size)
        self._grammars = SlotGrammars(grammars, model.vocab_size)
        self._scorer = PromptScorer(ops, model.vocab_size)
        self._pooler = Pooler(ops)
        self._postprocess = postprocess(ops, limits)
        self._last = LastTokens(ops, limits.max_num_seqs)
        self._failed = FailedRequests()

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute one step: launch it, and wait for it."""
        return self.finish(self.launch(plan))

    @property
    def launches_ahead(self) -> bool:
        """Whether steps may be launched while others are in flight."""
        return self.ops.queues

    def must_wait(self, plan: StepPlan) -> str | None:
        """Say why a plan cannot be launched before the steps in flight are finished; None if it can.

        A plan may always be launched if nothing is in flight. Behind steps in flight, the host does not know the last
        tokens of rows that go on: they are fed from the device to whatever needs no look at them.
        """
        if self.drafter is not None:
            return "a drafter guesses behind tokens that the host knows"
        batch = self.batch
        behind = (batch.unsettled[plan.slots] > 0) & (batch.gen[plan.slots] == plan.gens)
        if not behind.any():
            return None
        slots = plan.slots[behind]
        if (plan.num_tokens - plan.num_drafts)[behind].max() > 1 or (
            self.limits.max_drafts and batch.unsettled[slots].max() > 1
        ):
            return "a row computes more tokens than the last, which the host does not know"
        if self._grammars and len(self._grammars.among(slots)):
            return "a grammar follows tokens that the host knows"
        if self._sampler.reads_text(slots):
            return "what is banned depends on tokens that the host knows"
        return None

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue all that a step computes.

        A plan whose whole batch was revoked computes nothing and still yields an output.
        """
        self._apply(plan)
        batch, rows = self.batch, resolve_rows(plan, self.batch, self.limits, self.ops.padded)
        masks = self._grammars.begin(rows, batch.tokens)
        work = uploaded(self._gather(plan, rows), self.ops)
        sampled, read = self._compute(rows, work, masks)
        grid = self._grid(work, sampled)
        accepted = self._verify(work, grid)
        matrix = self._postprocess.token_matrix(grid, accepted, work.slots, work.revoked)
        if work.sampling is not None:
            self._last.keep(work.slots, grid)
        results = [matrix, accepted, sampled.peaks, *chain.from_iterable(result_groups(sampled, read))]
        begins = batch.advance(rows.slots[rows.sampling])
        return LaunchedStep(plan, rows, batch.gen.copy(), begins, sampled, read, self.ops.fetch_later(results))

    def finish(self, launched: LaunchedStep) -> StepOutput:
        """Wait for the oldest step in flight, and for no other.

        A request whose own row fails stands in `StepOutput.errors` of this step and of each later one that computes it,
        until its slot is admitted anew; whatever else fails is raised.
        """
        plan, gens, answer = launched.plan, launched.gens, launched.answer()
        self._look_for_failures(launched, answer)
        self._remember(launched, answer)
        ready = self.batch.num_drafts.copy() if self.drafter is not None or self._grammars else None
        errors = self._failed.of_step(plan.slots, gens)
        of_prompts = answer.prompt_logprobs, answer.pooled
        return StepOutput(plan.epoch, plan.step, answer.tokens, gens, ready, answer.logprobs, errors, *of_prompts)

    def mask_stats(self) -> MaskStats:
        """Return what grammars cost and spared so far."""
        return snapshot(self._grammars.stats)

    def warm_up(self, progress: LoadProgress) -> float:
        """Compute first steps, so that no request pays for first times; see `Ops.warm_up_tokens` and `warm_up_steps`.

        Returns the seconds that a token of the prefill took, cold as it was.
        """
        limits, ops = self.limits, self.ops
        length = min(limits.max_num_batched_tokens, limits.max_model_len - 1, ops.warm_up_tokens or sys.maxsize)
        plans = warm_up_plans(limits, length, ops.warm_up_steps(limits))
        seconds = []
        for done, plan in enumerate(plans):
            progress(done, len(plans))
            begun = time.perf_counter()
            if plan.num_drafts.any():
                drafts = np.zeros((len(plan.slots), limits.max_drafts), np.int32)
                self.batch.guess(plan.slots, drafts, plan.num_drafts)
            self.announce(plan)
            self.execute(plan)
            seconds.append(time.perf_counter() - begun)
        progress(len(plans), len(plans))
        self.batch = PersistentBatch(limits)
        self._sampler = self._sampler.emptied()
        ops.warmed_up()
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
            self._failed.clear(admission.slot, admission.gen)
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

    def _gather(self, plan: StepPlan, rows: Rows) -> StepWork:
        """Gather, on the host, the arrays of a step that the device has not."""
        batch, width = self.batch, self.limits.max_drafts + 1
        slots = rows.slots[rows.sampling]
        inputs = self._inputs(rows) if len(rows.slots) else None
        some = len(slots) > 0
        return StepWork(
            inputs=inputs,
            fed=None if inputs is None else self._last.gather(rows, batch.unsettled, len(inputs.token_ids)),
            sampling=self._sampler.gather(rows.logits_slots, rows.positions, rows.columns, batch.tokens)
            if some
            else None,
            slots=slots,
            revoked=np.array([revocation.slot for revocation in plan.revocations], np.int32),
            undrafted=np.zeros(len(slots), np.int32),
            cells=rows.cells(width).reshape(-1) if width > 1 and some else None,
            drafts=(batch.drafts(slots), rows.drafts) if rows.drafts.any() else None,
            unsampled=() if some else (np.empty((0, width), np.int32), np.empty(0, np.float32)),
        )

    def _inputs(self, rows: Rows) -> StepInput:
        batch = self.batch
        adapters = self.adapters.of_step(batch.places, rows.slots)
        return gather_inputs(rows, batch.tokens, batch.tables, self.limits.block_size, self.cache.spare_block, adapters)

    def _compute(self, rows: Rows, work: StepWork, masks: Callable[[], Masks] | None) -> tuple[Sampled, Readings]:
        """Run the model, choose a token from each of its rows of logits, and read what is wanted of prompts."""
        logits: Array = None
        read: Readings = None, None
        if work.inputs is not None:
            token_ids = self._last.feed(work.inputs.token_ids, work.fed)
            logits, read = self._run(rows, replace(work.inputs, token_ids=token_ids))
        if work.sampling is None:
            return Sampled(*work.unsampled), read
        return self._sampler.sample(logits, work.sampling, None if masks is None else masks()), read

    def _run(self, rows: Rows, inputs: StepInput) -> tuple[Array, Readings]:
        """Return the rows of logits, if there are any, and what is read of prompts."""
        forward, states_of = (self._forward, self._states) if inputs.lora_places is None else self.adapters.forwards
        scored, pooled = self._scorer.rows(rows), self._pooler.parts(rows)
        if not len(scored[0]) and not pooled:
            self._watch(inputs)
            return forward(inputs, self.cache), (None, None)
        states, head = states_of(inputs, self.cache), self._head
        read = (
            self._scorer.score(states, head, scored, self.batch.tokens) if len(scored[0]) else None,
            self._pooler.pool(states, head, pooled) if pooled else None,
        )
        return head(self.ops.gather_rows(states, inputs.logits_rows)) if len(rows.sampling) else None, read

    def _grid(self, work: StepWork, sampled: Sampled) -> Array:
        """Return the tokens int32[N, 1 + k] of the N rows that sample; unused cells mean nothing."""
        if work.sampling is None:
            return sampled.tokens
        if work.cells is None:
            return sampled.tokens.reshape(-1, 1)
        return self.ops.gather_rows(sampled.tokens, work.cells).reshape(-1, self.limits.max_drafts + 1)

    def _verify(self, work: StepWork, grid: Array) -> Array:
        """Count the drafts int32[N] that each sampling row keeps."""
        return work.undrafted if work.drafts is None else self.ops.verify(grid, *work.drafts)

    def _look_for_failures(self, launched: LaunchedStep, answer: StepAnswer) -> None:
        """Fail the requests of which a delivered token was chosen from logits that are not finite."""
        strange = ~np.isfinite(answer.peaks)
        if not strange.any():
            return
        rows, width = launched.rows, self.limits.max_drafts + 1
        cells = rows.cells(width)
        failed = (strange[cells] & (np.arange(width) <= answer.accepted[:, None])).any(axis=1)
        for slot, peaks in zip(rows.slots[rows.sampling][failed].tolist(), answer.peaks[cells][failed], strict=True):
            forbidden = not (np.isnan(peaks) | (peaks == np.inf)).any()
            why = self._grammars.trouble(slot) or ("all of its logits are -inf" if forbidden else NOT_FINITE)
            self._fail(slot, f"{NO_CHOICE}{why}", int(launched.gens[slot]))

    def _remember(self, launched: LaunchedStep, answer: StepAnswer) -> None:
        """Append what was delivered, and guess what comes next; a slot that was admitted anew has forgotten."""
        rows, begins, accepted = launched.rows, launched.begins, answer.accepted
        slots, verified = rows.slots[rows.sampling], rows.drafts
        stays = self.batch.gen[slots] == launched.gens[slots]
        if not stays.all():
            slots, begins, accepted, verified = slots[stays], begins[stays], accepted[stays], verified[stays]
        delivered = answer.tokens[slots]
        self.batch.settle(slots, begins, delivered, accepted)
        if rows.drafts.any():
            self._sampler.extend(slots, delivered, accepted)
        if self.drafter is None and not self._grammars:
            return
        healthy = self._healthy(slots)
        slots, delivered, verified, accepted = slots[healthy], delivered[healthy], verified[healthy], accepted[healthy]
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
        """Place drafts int32[n, k], of which row i has counts[i], behind the texts of `slots`, as grammars allow.

        A row ends before its first id without an embedding row, which only a wrong drafter proposes.
        """
        unknown = drafts.astype(np.uint32) >= self.limits.vocab_size
        if unknown.any():
            counts = np.where(unknown.any(axis=1), np.minimum(counts, unknown.argmax(axis=1)), counts).astype(np.int32)
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
        return self._failed.healthy(slots, self.batch.gen[slots])

    def _fail_one_of(self, slots: IntArray, error: SlotError) -> None:
        if error.slot not in slots[self._healthy(slots)]:
            raise error
        self._fail(error.slot, str(error))

    def _fail(self, slot: int, message: str, gen: int | None = None) -> None:
        """Fail the request that holds a slot, or the one that held it in generation `gen`."""
        held = int(self.batch.gen[slot])
        if gen is None or gen == held:
            self._grammars.drop(slot)
            self.batch.num_drafts[slot] = 0
        self._failed.add(slot, held if gen is None else gen, message)
