"""The runner template: one step on the device, the same for every backend."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.backends.contract import AdaptableModel, DraftLayer, HeadedModel, LoadProgress, Model, cache_shape
from fd_core.config import Limits
from fd_core.errors import ModelError
from fd_core.ops.contract import Array, Forward, HostCopies, KVCache, Ops, StepInput
from fd_core.ops.weights import Adapter
from fd_core.runner.batch import PersistentBatch
from fd_core.runner.drafting import Drafter, HiddenStates, SlotError
from fd_core.runner.inputs.images import SlotImages
from fd_core.runner.inputs.inputs import Fed, LastTokens, Rows, following_tokens, gather_inputs, resolve_rows, uploaded
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.runner.sampling.grammars import PAST, Masks, MaskStats, SlotGrammars
from fd_core.runner.sampling.prompt_scores import PooledParts, Pooler, PromptScorer, PromptScores
from fd_core.runner.sampling.sampler import Sampled, Sampler, SamplingWork
from fd_core.runner.warm_up import warm_up_plans
from fd_core.structured.compiler import GrammarCompiler, GrammarError
from fd_core.types import (
    NO_CHOICE,
    NOT_FINITE,
    Admission,
    IntArray,
    LogprobRows,
    PooledRows,
    PromptLogprobRows,
    StepOutput,
    StepPlan,
)
from fd_core.types.metrics import snapshot

Readings = tuple[PromptScores | None, PooledParts | None]
"""Prompt results of a step, on the device."""


Hidden = tuple[StepInput, Sequence[Array]]
"""Input of a step, and the parts of its hidden states that a draft head reads."""


_WORTH_WAITING: Final = 0.1
"""Share of a step's rows: drafts that save a step for more rows are worth the wait for the host, which takes about a
tenth of a step of all rows."""


def head_of(model: Model) -> DraftLayer | None:
    """Return the model's draft head, if it has one."""
    return model.draft_head if isinstance(model, HeadedModel) else None


def states_of(model: Model) -> Forward:
    """Return the function that yields the states of all tokens, and what a draft head reads, if there is one."""
    return model.states if head_of(model) is None else model.tapped  # type: ignore[attr-defined]  # it has a head


class RunnerAdapters:
    """Adapter slots, 1 and up; an adapter keeps its slot while it is loaded."""

    def __init__(self, ops: Ops, model: Model, cache: KVCache) -> None:
        self._ops = ops
        self._cache = cache
        self._model = model
        self.slots: list[Adapter | None] = []
        """Adapter of each slot, from slot 1 on; None for a free slot."""
        self._forwards: tuple[Forward, Forward] | None = None

    @property
    def held(self) -> list[Adapter]:
        """The loaded adapters."""
        return [adapter for adapter in self.slots if adapter is not None]

    def prepare(self) -> None:
        """Prepare for adapters before the first is loaded, if the model supports them. Raises as `replace`."""
        if isinstance(self._model, AdaptableModel):
            self.replace(())

    def replace(self, adapters: Iterable[Adapter]) -> None:
        """Load exactly these adapters; removed ones must be unused. No change on `ModelError` and `MemoryError`."""
        wanted = {adapter.digest: adapter for adapter in adapters}
        slots = [wanted.pop(held.digest, None) if held is not None else None for held in self.slots]
        for adapter in wanted.values():
            if None in slots:
                slots[slots.index(None)] = adapter
            else:
                slots.append(adapter)
        if not isinstance(self._model, AdaptableModel):
            raise ModelError(f"this backend has no adapters for {self._model.architecture}", field="lora_modules")
        model = self._model.with_adapters(slots)
        before = None if self._forwards is None else self._forwards[0]
        forward = self._ops.compile_adapted(model.forward, self._cache, before)
        self._forwards = forward, self._ops.compile_adapted(states_of(model))
        self._model = model
        self.slots = slots

    def slot_of(self, digest: str) -> int:
        """Return the slot of an adapter; `RuntimeError` if it is not loaded."""
        for index, adapter in enumerate(self.slots, start=1):
            if adapter is not None and adapter.digest == digest:
                return index
        raise RuntimeError(f"the runner has not loaded the adapter {digest[:12]}")

    @property
    def forwards(self) -> tuple[Forward, Forward]:
        """The model's `forward` and `states` for steps with adapters."""
        if self._forwards is None:
            raise RuntimeError("the runner has no adapters loaded")
        return self._forwards


@dataclass(frozen=True, slots=True)
class StepWork:
    """Arrays of a step with N sampling rows: gathered on the host, then uploaded in one transfer."""

    inputs: StepInput | None
    """None for a step without rows."""
    fed: Fed | None
    sampling: SamplingWork | None
    """None if no row samples, or if the host does not have the tokens for it yet."""
    slots: Array
    """int32[N]"""
    revoked: Array
    """int32[M]"""
    undrafted: Array
    """int32[N], zeros: the accepted drafts of rows without drafts."""
    cells: Array | None
    """int32[N * (1 + k)], `Rows.cells`; None if k is 0, and on the host if no row has drafts."""
    drafts: tuple[Array, Array] | None
    """int32[N, k] and the number of drafts per row, int32[N]; None for a step without drafts."""
    unsampled: tuple[Array, ...]
    """Tokens int32[0, 1 + k] and peaks float32[0] if no row samples; else empty."""


@dataclass(slots=True)
class LaunchedStep:
    """A step that is in flight or complete."""

    plan: StepPlan
    rows: Rows
    gens: IntArray
    """int32[max_num_seqs], the generation of each slot at launch."""
    begins: IntArray
    """int32[N], position of the first token of each sampling row in its text."""
    work: StepWork
    logits: Array
    """float32[R, V], until they are sampled; None for a step in which no row samples."""
    read: Readings
    hidden: Hidden | None
    """None without a draft head, and for a step without rows."""
    copies: HostCopies
    """Token matrix, accepted drafts, peaks, then the optional log-probabilities, prompt scores and vectors; nothing
    before the step is sampled."""
    sampled: Sampled | None = None
    """None until the step is sampled."""

    def extras(
        self, arrays: Iterable[npt.NDArray[Any]]
    ) -> tuple[LogprobRows | None, PromptLogprobRows | None, PooledRows | None]:
        """Return the log-probabilities, prompt scores and vectors, if any, from their arrays in `copies`."""
        found = iter(arrays)
        sampled, (scores, pooled) = self.sampled, self.read
        logprobs = None
        if sampled is not None and sampled.scores:
            slots, columns = self.rows.logits_slots[sampled.scored], self.rows.columns[sampled.scored]
            logprobs = LogprobRows(slots, columns, *islice(found, len(sampled.scores)))
        return (
            logprobs,
            None if scores is None else scores.on_host([*islice(found, len(scores.arrays))]),
            None if pooled is None else pooled.on_host([*found]),
        )


class Runner:
    """Executes plans in order and yields exactly one output per plan.

    A vendor supplies the `Ops`, and a `Postprocess` if there is none for its framework; batch, input building,
    sampling, verification of drafts and the transfer to the host are here. `ops`, `batch`, `cache` and `drafter` are
    exposed for audits and tests only: modifying them may break every invariant.
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
        """`grammars` is None if structured output is disabled; `kv_cache_dtype` is one of `KVShape.dtype`."""
        self.limits = limits
        self.drafter = drafter
        self.ops = ops
        ops.configure(limits)
        self._kv_cache_dtype = kv_cache_dtype
        self._allocate(model)
        if drafter is not None:
            drafter.allocate(limits)
        self._pooler = Pooler(ops)
        self._compile(model)
        self._watch: Callable[[StepInput], None] | None = None
        self.batch = PersistentBatch(limits)
        self._sampler = Sampler(ops, limits.max_num_seqs, model.vocab_size)
        self._grammars = SlotGrammars(grammars, model.vocab_size)
        self._scorer = PromptScorer(ops, model.vocab_size)
        self._postprocess = postprocess(ops, limits)
        self._last = LastTokens(ops, limits.max_num_seqs)
        self._drafted = 0
        """Steps in flight with drafts."""
        self._drafting = np.zeros(limits.max_num_seqs, np.float64)
        """By slot, the share of recent steps after which the drafter had drafts."""
        self._failed: dict[tuple[int, int], str] = {}
        """Reasons of failed requests, by slot and generation, as steps in flight may belong to the slot's previous
        request."""

    @property
    def released(self) -> bool:
        """True between `release` and `restore`."""
        return "cache" not in self.__dict__

    def replace_model(self, model: Model) -> None:
        """Compute with other weights of the same shapes. Only called while no slot is occupied."""
        held = self.adapters.held
        self._compile(model)
        self._hold_again(held)

    def release(self) -> None:
        """Free the KV cache. Only called while no slot is occupied; no step follows before `restore`."""
        if not self.released:
            self._adapters_held = self.adapters.held
        self._drop()

    def restore(self, model: Model) -> None:
        """Allocate the KV cache again, and compute with a model of the same shapes. Raises `MemoryError`."""
        try:
            self._allocate(model)
            self._compile(model)
            self._hold_again(self._adapters_held)
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        for name in ("cache", "adapters", "_forward", "_states", "_head", "images"):
            self.__dict__.pop(name, None)

    def _hold_again(self, adapters: list[Adapter]) -> None:
        """Load adapters on this rank: every rank does so when the model changes."""
        if adapters:
            RunnerAdapters.replace(self.adapters, adapters)

    def _allocate(self, model: Model) -> None:
        shape = cache_shape(model, self.limits.block_size, self._kv_cache_dtype, self.limits.groups)
        self.cache = self.ops.allocate_kv(shape, self.limits.num_kv_blocks)

    def _compile(self, model: Model) -> None:
        # A model of `transformers` calls more than operations of the pack, so it is not recorded.
        compiles = getattr(model, "compiles", True)
        self._forward = self.ops.compile(model.forward) if compiles else model.forward
        self._states = self.ops.compile_states(states_of(model)) if compiles else model.states
        self._draft_head = head_of(model)
        pads = compiles and self._draft_head is None and type(self.ops).padded is not Ops.padded
        self._padded = self.ops.padded if pads else None
        self._head = model.head
        self._pooler.shift = getattr(model, "state_shift", None)  # models of plugins may lack it
        takes_images = getattr(model, "images", None) is not None  # models of plugins may lack it
        self.images = SlotImages(self.ops, model, self.limits.max_num_batched_tokens) if takes_images else None
        """None if the model takes no images."""
        self.adapters = RunnerAdapters(self.ops, model, self.cache)
        """Only changed between steps, on the thread that executes them."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute one step: launch it, and wait for it."""
        return self.finish(self.launch(plan))

    @property
    def launches_ahead(self) -> bool:
        """True if steps may be launched while others are in flight."""
        return self.ops.queues

    def must_wait(self, plan: StepPlan) -> str | None:
        """Return the reason why a plan must wait for the steps in flight; None if it can be launched.

        A plan may always be launched if nothing is in flight. With steps in flight, the last tokens of continuing rows
        are only on the device, which suffices for the forward pass unless it needs more than one of them.
        """
        if self.drafter is not None and (self._draft_head is not None or self.drafter.kv_shape is not None):
            return "a drafter computes a model between the steps"
        if self._drafted:
            return "drafts in flight decide how long the texts are"
        batch = self.batch
        pending = (batch.unsettled[plan.slots] > 0) & (batch.gen[plan.slots] == plan.gens)
        if not pending.any():
            return None
        if (plan.num_tokens - plan.num_drafts)[pending].max() > 1:
            return "a row computes several tokens that are not on the host yet"
        saving = float(self._drafting[plan.slots[pending & (plan.num_drafts > 0)]].sum())
        if self._grammars.matchers:
            saving += self._grammars.forcing(plan.slots[pending])
        if saving > _WORTH_WAITING * len(plan.slots):
            return "many rows have drafts after the tokens in flight, which save more steps than the wait costs"
        return None

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue the work of a step; a plan whose whole batch was preempted still yields an output.

        It is left to `sample` if the host must read tokens that are only on the device, for a grammar or banned words.
        """
        batch = self.batch
        for admission in plan.admissions:
            self._admit(admission)
        if self.images is not None:
            self.images.begin(plan)
        batch.grant(plan)
        rows = resolve_rows(plan, batch, self.limits, padded=self._padded)
        if self.limits.whole_prompts and not (plan.samples & (plan.starts == 0)).all():
            raise RuntimeError(f"step {plan.step} computes a part of a prompt, but this model attends to all of it")
        late = False
        if self.ops.queues and len(pending := rows.sampled_slots[batch.unsettled[rows.sampled_slots] > 0]):
            late = len(self._grammars.among(pending)) > 0 or self._sampler.reads_text(pending)
        masks = self._grammars.begin(rows, batch.tokens) if self._grammars.matchers and not late else None
        work = self._gather(plan, rows, late)
        if not self.ops.on_host:
            work = uploaded(work, self.ops)
        logits, read, hidden = self._compute(rows, work)
        if late:
            sampled, copies = None, self.ops.fetch_later([])
        else:
            sampled, copies = self._sample(logits, work, work.sampling, masks, read)
            logits = None
        begins = batch.advance(rows.sampled_slots)
        self._drafted += rows.drafted
        return LaunchedStep(plan, rows, batch.gen.copy(), begins, work, logits, read, hidden, copies, sampled)

    def sample(self, launched: LaunchedStep) -> None:
        """Queue what `launch` left of a step, whose last tokens are known now; no step after it has been launched."""
        rows, tokens, logits = launched.rows, self.batch.tokens, launched.logits
        masks = self._grammars.begin(rows, tokens) if self._grammars.matchers else None
        sampling = self._sampler.gather(rows.logits_slots, rows.positions, rows.columns, tokens=tokens)
        launched.sampled, launched.copies = self._sample(
            logits, launched.work, uploaded(sampling, self.ops), masks, launched.read
        )
        launched.logits = None

    def finish(self, launched: LaunchedStep) -> StepOutput:
        """Wait for the oldest step in flight only.

        A request whose row fails is in `StepOutput.errors` of this step and of each later one that computes it, until
        its slot is admitted again; other failures are raised.
        """
        batch, plan, gens, rows = self.batch, launched.plan, launched.gens, launched.rows
        self._drafted -= rows.drafted
        tokens, accepted, peaks, *more = launched.copies.wait()
        if not np.isfinite(peaks).all():
            self._fail_strange(launched, accepted, peaks)
        slots, begins, verified, kept = rows.sampled_slots, launched.begins, rows.drafts, accepted
        stays = batch.gen[slots] == gens[slots]
        if not stays.all():  # not if the slot was admitted again
            slots, begins, verified, kept = slots[stays], begins[stays], verified[stays], kept[stays]
        delivered = tokens[slots]
        batch.settle(slots, begins, delivered, kept)
        if rows.drafted and self._sampler.penalties.num_rows:
            self._sampler.penalties.extend(slots, delivered, kept)
        if launched.hidden is not None:
            self._show(launched.hidden, rows, accepted)
        if self.drafter is not None or self._grammars.matchers:
            self._continue(slots, delivered, verified, accepted=kept)
        ready = batch.num_drafts.copy() if self.drafter is not None or self._grammars.matchers else None
        errors: tuple[tuple[int, str], ...] = ()
        if self._failed:
            self._failed = {key: why for key, why in self._failed.items() if key[1] >= gens[key[0]]}
            keys = ((slot, int(gens[slot])) for slot in plan.slots.tolist())
            errors = tuple((key[0], self._failed[key]) for key in keys if key in self._failed)
        logprobs, scores, vectors = launched.extras(more) if more else (None, None, None)
        forced = self._grammars.take_accepted(len(gens)) if rows.drafted else None
        return StepOutput(plan.epoch, plan.step, tokens, gens, ready, logprobs, errors, scores, vectors, forced)

    def mask_stats(self) -> MaskStats:
        """Return the cost and savings of grammars so far."""
        return snapshot(self._grammars.stats)

    def warm_up(self, progress: LoadProgress) -> float:
        """Compute first steps, see `Ops.warm_up_steps`; return the seconds per token of the cold prefill."""
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
        """Receive a plan on submission, on the submitting thread, while others may be executing."""

    def check(self) -> None:
        """Raise `EngineDead` if a worker process of another rank is lost; called while no step executes."""

    def close(self) -> None:
        """End the worker processes of the other ranks."""

    def watch_forward(self, watch: Callable[[StepInput], None]) -> None:
        """Call `watch` with the input of every forward pass from now on."""
        self._watch = watch

    def _admit(self, admission: Admission) -> None:
        slot, params = admission.slot, admission.params
        if self._failed:
            self._failed.pop((slot, admission.gen), None)
        self.batch.admit(admission, self.adapters.slot_of(admission.adapter) if admission.adapter else 0)
        if self._scorer.wanted or params.prompt_logprobs is not None:
            self._scorer.admit(admission)
        if self._pooler.wanted or admission.pooling is not None:
            self._pooler.admit(admission)
        try:
            self._sampler.admit(admission)
        except Exception as error:  # noqa: BLE001 - any exception fails only this request
            self._fail(slot, f"its sampling parameters are invalid: {error}")
        if self._grammars.matchers or params.grammar is not None or params.reasoning is not None:
            try:
                self._grammars.admit(admission)
            except GrammarError as error:
                self._fail(slot, f"its grammar is invalid: {error}")
        if self.drafter is not None:
            self._drafting[slot] = 0.0
            self._admit_to_drafter(self.drafter, slot, admission.token_ids)

    def _gather(self, plan: StepPlan, rows: Rows, late: bool) -> StepWork:
        """Gather the host arrays of a step, except `late` ones for sampling."""
        batch, limits, slots = self.batch, self.limits, rows.sampled_slots
        inputs = fed = sampling = cells = None
        if len(rows.slots):
            adapters = batch.adapter_slots if self.adapters.slots and batch.adapter_slots[rows.slots].any() else None
            inputs = gather_inputs(
                rows, batch.tokens, batch.tables, limits.block_size, self.cache.spare_block, adapters
            )
            if self.images is not None:
                inputs = self.images.placed(rows, rows.begins, inputs)
            if self.ops.queues:
                fed = self._last.gather(rows, batch.unsettled, len(inputs.token_ids))
        unsampled: tuple[Array, ...] = ()
        if len(slots):
            if not late:
                sampling = self._sampler.gather(rows.logits_slots, rows.positions, rows.columns, tokens=batch.tokens)
            if limits.max_drafts and (rows.drafted or not self.ops.on_host):
                cells = rows.cells(limits.max_drafts + 1).reshape(-1)
        else:
            unsampled = np.empty((0, limits.max_drafts + 1), np.int32), np.empty(0, np.float32)
        return StepWork(
            inputs=inputs,
            fed=fed,
            sampling=sampling,
            slots=slots,
            revoked=np.array([revocation.slot for revocation in plan.revocations], np.int32),
            undrafted=np.zeros(len(slots), np.int32),
            cells=cells,
            drafts=(batch.drafts(slots), rows.drafts) if rows.drafted else None,
            unsampled=unsampled,
        )

    def _compute(self, rows: Rows, work: StepWork) -> tuple[Array, Readings, Hidden | None]:
        """Run the model, and compute the prompt results."""
        logits: Array = None
        hidden: Hidden | None = None
        read: Readings = None, None
        if (inputs := work.inputs) is not None:
            if work.fed is not None:
                inputs = replace(inputs, token_ids=self._last.feed(inputs.token_ids, work.fed))
            if self.images is not None:
                inputs = self.images.embedded(rows, rows.begins, inputs)
            forward, all_states = (self._forward, self._states) if inputs.lora_slots is None else self.adapters.forwards
            scored = self._scorer.rows(rows) if self._scorer.wanted else None
            pooled = self._pooler.parts(rows) if self._pooler.wanted else ()
            if scored is not None or pooled or self.limits.whole_prompts or self._draft_head is not None:
                states = all_states(inputs, self.cache)
                if self._draft_head is not None:
                    states, *taps = states
                    hidden = inputs, taps or [states]
                read = (
                    None if scored is None else self._scorer.score(states, self._head, scored, self.batch.tokens),
                    self._pooler.pool(states, self._head, pooled) if pooled else None,
                )
                if len(rows.sampling):
                    logits = self._head(self.ops.gather_rows(states, inputs.logits_rows))
            else:
                if self._watch is not None:
                    self._watch(inputs)
                logits = forward(inputs, self.cache)
        return logits, read, hidden

    def _sample(
        self,
        logits: Array,
        work: StepWork,
        sampling: SamplingWork | None,
        masks: Callable[[], Masks] | None,
        read: Readings,
    ) -> tuple[Sampled, HostCopies]:
        """Sample a token from each row of logits, verify drafts, and queue the copies of all results to the host."""
        if sampling is None:
            tokens, peaks = work.unsampled
            sampled = Sampled(tokens, peaks, [])
        else:
            sampled = self._sampler.sample(logits, sampling, None if masks is None else masks())
        grid, width = sampled.tokens, self.limits.max_drafts + 1
        if work.cells is not None:
            grid = self.ops.gather_rows(grid, work.cells).reshape(-1, width)
        elif sampling is not None:
            grid = grid.reshape(-1, 1)
            if width > 1:  # on the host, and no row has drafts
                grid = np.repeat(grid, width, axis=1)
        accepted = work.undrafted if work.drafts is None else self.ops.verify(grid, *work.drafts)
        matrix = self._postprocess.token_matrix(grid, accepted, work.slots, work.revoked)
        if sampling is not None and self.ops.queues:
            self._last.keep(work.slots, grid)
        results = [matrix, accepted, sampled.peaks, *sampled.scores]
        for part in read:
            if part is not None:
                results += part.arrays
        return sampled, self.ops.fetch_later(results)

    def _show(self, hidden: Hidden, rows: Rows, accepted: IntArray) -> None:
        """Pass the hidden states of a settled step to the drafter."""
        (inputs, taps), batch, drafter, head = hidden, self.batch, self.drafter, self._draft_head
        if drafter is None or head is None:
            raise RuntimeError("hidden states without a drafter that reads them")
        held = (rows.starts + rows.counts)[rows.sampling]
        room = -(-held // self.limits.block_size) * self.limits.block_size
        last = rows.cells(self.limits.max_drafts + 1)[np.arange(len(accepted)), accepted]
        follow, rows_of_last = self.ops.upload([following_tokens(rows, batch.tokens), rows.logits_rows[last]])
        states = reduce(self.ops.add, taps)
        step = replace(inputs, token_ids=follow, logits_rows=rows_of_last, states=states)
        slots = rows.sampled_slots
        drafter.read(
            HiddenStates(step, self.cache, head, slots, batch.length[slots], room, batch.tokens, tables=batch.tables)
        )

    def _fail_strange(self, launched: LaunchedStep, accepted: IntArray, peaks: npt.NDArray[np.float32]) -> None:
        """Fail the requests with a delivered token that was sampled from logits that are not finite."""
        rows, width = launched.rows, self.limits.max_drafts + 1
        cells = rows.cells(width)
        failed = (~np.isfinite(peaks)[cells] & (np.arange(width) <= accepted[:, None])).any(axis=1)
        for slot, found in zip(rows.sampled_slots[failed].tolist(), peaks[cells][failed], strict=True):
            why = NOT_FINITE
            if not (np.isnan(found) | (found == np.inf)).any():
                why = self._grammars.failure_reason(slot) or "all of its logits are -inf"
            self._fail(slot, f"{NO_CHOICE}{why}", int(launched.gens[slot]))

    def _continue(self, slots: IntArray, delivered: IntArray, verified: IntArray, accepted: IntArray) -> None:
        """Advance the grammars of continuing requests by the delivered tokens, and draft the next ones."""
        healthy = self._healthy(slots)
        slots, delivered, verified, accepted = slots[healthy], delivered[healthy], verified[healthy], accepted[healthy]
        if self._grammars.matchers:
            for slot, message in self._grammars.extend(slots, delivered, verified, accepted):
                self._fail(slot, message)
            healthy = self._healthy(slots)
            slots, accepted, delivered = slots[healthy], accepted[healthy], delivered[healthy]
        if not len(slots):
            return
        if self.drafter is not None:
            self._draft(self.drafter, slots, delivered, counts=accepted + 1)
        elif self._grammars.matchers and self.limits.max_drafts and not self._drafted:
            some = self._grammars.among(slots)
            self._guess(some, np.zeros((len(some), self.limits.max_drafts), np.int32), np.zeros(len(some), np.int32))

    def _draft(self, drafter: Drafter, slots: IntArray, tokens: IntArray, counts: IntArray) -> None:
        """Draft after the delivered tokens; leaves out slots for which the drafter fails."""
        try:
            drafter.extend(slots, tokens, counts)
        except SlotError as error:
            self._fail_one_of(slots, error)
            # It is unknown which other slots were extended, so all are admitted with their whole texts.
            for slot in slots[self._healthy(slots)].tolist():
                known = self.batch.length[slot] - self.batch.unsettled[slot]
                self._admit_to_drafter(drafter, slot, self.batch.tokens[slot, :known].copy())
        while len(slots := slots[self._healthy(slots)]):
            try:
                drafts, counts = drafter.propose(slots, self.limits.max_drafts)
            except SlotError as error:
                self._fail_one_of(slots, error)
            else:
                self._drafting[slots] = PAST * self._drafting[slots] + (1 - PAST) * (counts > 0)
                if not self._drafted:  # drafts follow the last token, which may be in flight
                    self._guess(slots, drafts, np.where(self.batch.unsettled[slots] > 0, np.int32(0), counts))
                return

    def _guess(self, slots: IntArray, drafts: IntArray, counts: IntArray) -> None:
        """Store counts[i] of drafts[i] after each text, as grammars allow, up to the first id outside the embedding."""
        unknown = drafts.astype(np.uint32) >= self.limits.vocab_size
        if unknown.any():
            counts = np.where(unknown.any(axis=1), np.minimum(counts, unknown.argmax(axis=1)), counts).astype(np.int32)
        if self._grammars.matchers:
            drafts, counts = drafts.copy(), counts.copy()
            self._grammars.shape_drafts(slots, drafts, counts, self.batch.unsettled[slots])
        self.batch.guess(slots, drafts, counts)

    def _admit_to_drafter(self, drafter: Drafter, slot: int, tokens: IntArray) -> None:
        try:
            drafter.admit(slot, tokens)
        except Exception as error:  # noqa: BLE001 - any exception fails only this request
            self._fail(slot, f"the drafter {drafter.name} failed: {type(error).__name__}: {error}")

    def _healthy(self, slots: IntArray) -> npt.NDArray[np.bool_]:
        """Return bool[n], True for requests in `slots` int32[n] that have not failed."""
        keys = zip(slots.tolist(), self.batch.gen[slots].tolist(), strict=True)
        return np.array([key not in self._failed for key in keys], np.bool_)

    def _fail_one_of(self, slots: IntArray, error: SlotError) -> None:
        if error.slot not in slots[self._healthy(slots)]:
            raise error
        self._fail(error.slot, str(error))

    def _fail(self, slot: int, message: str, gen: int | None = None) -> None:
        """Fail the request in a slot, or the one that had it in generation `gen`."""
        held = int(self.batch.gen[slot])
        if gen is None or gen == held:
            self._grammars.matchers.pop(slot, None)
            self.batch.num_drafts[slot] = 0
        self._failed[slot, held if gen is None else gen] = message
