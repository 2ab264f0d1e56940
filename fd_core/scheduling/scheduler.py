"""The scheduler: decides what each step computes.

Pure: no I/O, no clock, no randomness. `plan` is called once for each step; the output side
(`fd_core.engine.outputs`) tells what became of it through `settle`, `finish` and `released`.

Ownership: the scheduler owns requests, slots and blocks. A running or loading slot owns the blocks in its table. A slot
that is taken back or finished gives its blocks to the pool, fenced by the last step that touches them and pinned while
they are copied; a draining slot owns nothing but its place.

What is to happen to KV outside a step leaves through `take_effects` and comes back through `completed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.config import Limits
from fd_core.errors import BadRequest
from fd_core.kv.blocks import BlockPool
from fd_core.kv.effects import (
    Completion,
    Effect,
    Found,
    Loaded,
    LoadPaceMeasured,
    NotStored,
    PrefillPaceMeasured,
    Saved,
    Transferred,
)
from fd_core.kv.events import Recorder
from fd_core.kv.prefix import PrefixHasher
from fd_core.metrics import counter, gauge
from fd_core.scheduling.budget import Budget, allot_decodes
from fd_core.scheduling.drafts import DraftControl
from fd_core.scheduling.gauges import SchedulerGauges
from fd_core.scheduling.plan import PlanBuilder
from fd_core.scheduling.policies import Policy
from fd_core.scheduling.prefixes import Prefixes
from fd_core.scheduling.requests import Event, Request, State
from fd_core.scheduling.reserve import ReturnCost, UsageForecast, peak_growth
from fd_core.scheduling.slots import SlotTable
from fd_core.scheduling.storage import Arrival, KeepKV, Storage
from fd_core.scheduling.transfers import Transfers
from fd_core.scheduling.victims import VictimPolicy
from fd_core.scheduling.waiting import WaitingQueue
from fd_core.types import FinishReason, IntArray, RequestSpec, StepPlan

__all__ = ["Scheduler", "SchedulerStats"]


class SchedulerStats(msgspec.Struct, kw_only=True):
    """What the scheduler counted since the start, and gauges of this moment."""

    running: Annotated[int, gauge("requests_running", "Requests that hold a slot and compute.")] = 0
    loading: Annotated[
        int, gauge("requests_loading", "Requests that hold a slot and wait for KV from outside the device.")
    ] = 0
    waiting: Annotated[int, gauge("requests_waiting", "Requests that wait for a slot.")] = 0
    take_backs_in_flight: Annotated[
        int, gauge("take_backs_in_flight", "Revoked slots whose release the runner has not confirmed.")
    ] = 0
    steps: Annotated[int, counter("steps", "Steps planned.")] = 0
    budget_used: Annotated[int, counter("budget_used_tokens", "Tokens computed, over all steps.")] = 0
    budget_limit: Annotated[
        int, counter("budget_limit_tokens", "Tokens that the step budgets allowed, over all steps.")
    ] = 0
    prompt_tokens: Annotated[int, counter("prompt_tokens", "Prompt tokens of the requests admitted.")] = 0
    preemptions: Annotated[int, counter("preemptions", "Requests preempted to free KV blocks for others.")] = 0
    recomputed_tokens: Annotated[
        int, counter("recomputed_tokens", "Tokens computed a second time after a preemption.")
    ] = 0
    prefix_queries: Annotated[int, counter("prefix_queries_tokens", "Prompt tokens looked up in the prefix cache.")] = 0
    prefix_hits: Annotated[int, counter("prefix_hits_tokens", "Prompt tokens found in the prefix cache.")] = 0


class Scheduler:
    """Plans steps for at most `max_num_seqs` requests at a time under the step token budget."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        victims: VictimPolicy,
        hasher: PrefixHasher | None,
        drafts: DraftControl | None = None,
        *,
        keep_kv: KeepKV | None = None,
        paired: bool = False,
        recorder: Recorder | None = None,
        epoch: int = 1,
    ) -> None:
        """`hasher` None turns prefix caching off; `keep_kv` None keeps no KV outside the device.

        `paired`: prompts may be computed by other workers, or for them. Both need a hasher. `recorder` notes which
        prefixes the device holds.
        """
        self.limits = limits
        self.epoch = epoch
        self.slots = SlotTable(limits.max_num_seqs, limits.max_model_len, limits.block_size)
        self.recorder = recorder
        self.pool = BlockPool(limits.num_kv_blocks, recorder)
        self.waiting = WaitingQueue(policy)
        self.drafts = drafts
        self.counters = SchedulerStats()
        self.storage = None if keep_kv is None else Storage(self.pool, limits.block_size, keep_kv)
        self.transfers = Transfers(self.pool, limits.block_size) if paired else None
        self._policy = policy
        self._victims = victims
        self._forecast = UsageForecast()
        self._return_cost = ReturnCost(0.0 if keep_kv is not None and keep_kv.preempted else 1.0)
        self.prefixes = Prefixes(hasher, self.pool, recorder)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._step = 0
        self._aborting: list[Request] = []
        """Running requests to take back in the next plan."""
        self._arrived: list[int] = []
        """Slots whose load is over; the next plan tells the runner of them."""

    # Requests come and go ---------------------------------------------------------------------------------

    def add(self, spec: RequestSpec) -> Request:
        """Queue a request. Raises `BadRequest` if it can never run here."""
        if spec.request_id in self._requests:
            raise BadRequest(f"a request with id {spec.request_id!r} is already running", field="request_id")
        if not spec.prompt:
            raise BadRequest("the prompt has no tokens", field="prompt")
        if len(spec.prompt) >= self.limits.max_model_len:
            raise BadRequest(
                f"the prompt has {len(spec.prompt)} tokens, but prompt and output together may have at most "
                f"{self.limits.max_model_len}",
                field="prompt",
                hint="shorten it",
            )
        request = Request(spec, self._arrivals, self.limits.max_model_len, self.prefixes.root(spec.cache_salt))
        if len(spec.prompt) + len(spec.delivered) >= request.limit:
            raise BadRequest(
                f"{len(spec.delivered)} tokens were delivered already, so none of at most "
                f"{request.limit - len(spec.prompt)} is left to generate",
                field="delivered",
            )
        self._arrivals += 1
        self._requests[spec.request_id] = request
        self._wait(request)
        return request

    def abort(self, request_id: str) -> bool:
        """Ask for a request's end; return whether it ended at once, which it does while it waits or loads.

        Unknown ids and repeated aborts are ignored.
        """
        request = self._requests.get(request_id)
        if request is None or request.abort_wanted or request.ended is not None:
            return False
        request.abort_wanted = True
        if request.state is State.WAITING:
            self.waiting.remove(request)
            if self.storage is not None:
                self.storage.forget(request)
            request.advance(Event.ABORT_WAITING)
            self._forget(request, FinishReason.ABORT)
            return True
        if request.state is State.LOADING:
            self._abort_loading(request)
            return True
        if request.state is State.RUNNING:
            self._aborting.append(request)
        return False

    def request_ids(self) -> list[str]:
        """Return the ids of all requests that have not ended."""
        return [name for name, request in self._requests.items() if request.ended is None]

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended or any slot is still draining."""
        busy = bool(self._requests) or bool(self.slots.draining.any())
        if self.transfers is not None:
            busy |= self.transfers.busy
        return busy or (self.storage is not None and self.storage.busy)

    @property
    def num_running(self) -> int:
        """Slots that compute."""
        return int(self.slots.running.sum())

    @property
    def num_draining(self) -> int:
        """Slots whose take-back is not answered."""
        return int(self.slots.draining.sum())

    @property
    def num_loading(self) -> int:
        """Slots whose KV is on its way from outside the device."""
        return int(self.slots.loading.sum())

    def gauges(self) -> SchedulerGauges:
        """Return the length of the queue and the use of the KV blocks."""
        pool = self.pool
        return SchedulerGauges(len(self.waiting), pool.num_owned, pool.num_fenced, pool.num_cached)

    def stats(self) -> SchedulerStats:
        """Return counters, and gauges as they are now."""
        return msgspec.structs.replace(
            self.counters,
            running=self.num_running,
            loading=self.num_loading,
            waiting=len(self.waiting),
            take_backs_in_flight=self.num_draining,
        )

    # Planning ---------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Decide the next step, or return None if there is nothing that a step could do now."""
        draft = PlanBuilder(self.epoch, self._step)
        budget = Budget(self.limits.max_num_batched_tokens)
        self._announce_arrivals(draft)
        self._take_back_aborted(draft)
        rows = self._make_room(self.slots.ready(), draft)
        self._decode(rows, budget, draft)
        self._continue_prefills(rows, budget, draft)
        if not draft.preempted:
            self._admit(budget, draft)
        if draft.empty:
            return None
        return self._seal(draft, budget)

    def _announce_arrivals(self, draft: PlanBuilder) -> None:
        slots = self.slots
        for slot in self._arrived:
            request = slots.requests[slot]
            if request is not None:
                tokens = slots.tokens[slot, : slots.known[slot]].copy()
                draft.admit(slot, slots, request, tokens, int(slots.computed[slot]))
        self._arrived.clear()

    def _take_back_aborted(self, draft: PlanBuilder) -> None:
        for request in self._aborting:
            if request.state is State.RUNNING:
                self._take_back(request, draft)
        self._aborting.clear()

    def _make_room(self, ready: npt.NDArray[np.intp], draft: PlanBuilder) -> npt.NDArray[np.intp]:
        """Give every ready slot the block its next token needs; return the slots that may run.

        The oldest are served first. If blocks run out, blocks that come free soon are waited for before a victim is
        chosen, so one shortage never takes back a chain of requests.
        """
        slots = self.slots
        block_size = self.limits.block_size
        full = ready[slots.computed[ready] >= slots.num_blocks[ready] * block_size]
        if not len(full):
            return ready
        stalled = []
        short = 0
        for slot in full[np.argsort(slots.arrival[full], kind="stable")].tolist():
            if not slots.running[slot]:
                continue
            blocks = self.pool.allocate(1)
            while blocks is None and short >= self.pool.num_fenced:
                self._preempt(self._choose_victim(), draft)
                if not slots.running[slot]:
                    break
                blocks = self.pool.allocate(1)
            if blocks is not None:
                draft.grant(slot, slots.append_blocks(slot, blocks), blocks)
            elif slots.running[slot]:
                short += 1
                stalled.append(slot)
        may_run = slots.running[ready]
        if stalled:
            may_run &= ~np.isin(ready, stalled)
        return ready[may_run]

    def _decode(self, rows: npt.NDArray[np.intp], budget: Budget, draft: PlanBuilder) -> None:
        """Charge one token for each decode, all of them first.

        If decodes alone would use up the budget, unfinished prefills take part in the rotation with one token each, so
        that they advance too.
        """
        slots = self.slots
        decoding = rows[slots.length[rows] - slots.computed[rows] == 1]
        if len(decoding) >= budget.left:
            decoding = rows
        if not len(decoding):
            return
        drafts = self._wanted_drafts(decoding, draft)
        chosen, granted = allot_decodes(budget, drafts, slots.last_step[decoding])
        draft.add_rows(decoding[chosen], granted + 1, granted)

    def _wanted_drafts(self, rows: npt.NDArray[np.intp], draft: PlanBuilder) -> IntArray:
        """Return int32[n]: drafts each row would verify if the budget allows, with room for their KV."""
        if self.drafts is None:
            return np.zeros(len(rows), np.int32)
        slots = self.slots
        is_decode = slots.length[rows] - slots.computed[rows] == 1
        ready = np.where(is_decode, slots.drafts_ready[rows], 0)
        wanted = self.drafts.allowed(rows, np.minimum(ready, slots.limit[rows] - slots.length[rows] - 1))
        room = slots.num_blocks[rows] * self.limits.block_size - slots.computed[rows] - 1
        for index in np.flatnonzero(wanted > room).tolist():
            # A guess takes a block only if nobody else will miss it.
            slot = int(rows[index])
            blocks = self.pool.allocate(1) if self.pool.num_free > len(rows) else None
            if blocks is not None:
                draft.grant(slot, slots.append_blocks(slot, blocks), blocks)
                room[index] += self.limits.block_size
        fitting: IntArray = np.minimum(wanted, room).astype(np.int32)
        return fitting

    def _continue_prefills(self, rows: npt.NDArray[np.intp], budget: Budget, draft: PlanBuilder) -> None:
        if not budget.left:
            return
        slots = self.slots
        prefilling = rows[slots.length[rows] - slots.computed[rows] > 1]
        for slot in prefilling[np.argsort(slots.arrival[prefilling], kind="stable")].tolist():
            self._prefill(slot, budget, draft)

    def _prefill(self, slot: int, budget: Budget, draft: PlanBuilder) -> None:
        chunk = budget.take(int(self.slots.length[slot] - self.slots.computed[slot]))
        if chunk:
            draft.add_row(slot, chunk)

    def _admit(self, budget: Budget, draft: PlanBuilder) -> None:
        """Move waiting requests into free slots while budget, slots and blocks allow."""
        passed_over: list[Request] = []
        slot = self.slots.free_slot()
        while budget.left and slot is not None and len(passed_over) <= self.limits.max_num_seqs:
            request = self.waiting.pop()
            if request is None:
                break
            if request.lookup is not None:
                passed_over.append(request)
                continue
            tokens = request.known_tokens()
            keys = self.prefixes.keys(request, tokens)
            matched = self.pool.match(keys)
            if len(matched) < len(keys) and self.prefixes.is_computing(keys[len(matched)]):
                # A running prefill is about to compute the next block of this very prefix.
                passed_over.append(request)
                continue
            if len(matched) < len(keys) and self._ask_after_all(request, keys):
                # The device held all of it when the request began to wait; others have taken those blocks since.
                passed_over.append(request)
                continue
            if not self._occupy(slot, request, tokens, keys, matched):
                passed_over.append(request)
                break
            if not (self._fetch(slot, request, tokens, matched) or self._load(slot, request, keys, matched)):
                request.advance(Event.ADMIT)
                cached = len(matched) * self.limits.block_size
                self._begin(slot, request, cached, cached)
                draft.admit(slot, self.slots, request, tokens, int(self.slots.computed[slot]))
                self._prefill(slot, budget, draft)
            slot = self.slots.free_slot()
        for request in passed_over:
            self.waiting.push(request)

    def _occupy(self, slot: int, request: Request, tokens: IntArray, keys: list[bytes], matched: IntArray) -> bool:
        """Give a request a slot and blocks for all its tokens, or change nothing and return False."""
        needed = -(-len(tokens) // self.limits.block_size) - len(matched)
        self.pool.acquire(matched)
        fits = needed + self._growth_with(request, len(tokens)) <= self.pool.num_free
        blocks = self.pool.allocate(needed) if fits else None
        if blocks is None:
            self.pool.release(matched, -1)
            return False
        slots = self.slots
        slots.occupy(slot, request, tokens)
        slots.append_blocks(slot, matched)
        slots.append_blocks(slot, blocks)
        slots.registered[slot] = len(matched)
        if request.rank is not None:
            self._policy.admitted(request, request.rank)
        request.slot = slot
        self.prefixes.begin(keys[len(matched) :])
        return True

    def _fetch(self, slot: int, request: Request, tokens: IntArray, matched: IntArray) -> bool:
        """Have another worker compute the rest of the prompt, if the request came with one; the slot waits for it."""
        if self.transfers is None or not self.transfers.wants(request):
            return False
        if not self.transfers.fetch(request, slot, tokens, self.slots.tables[slot], len(matched)):
            return False
        self._starts_to_load(slot, request)
        return True

    def _load(self, slot: int, request: Request, keys: list[bytes], matched: IntArray) -> bool:
        """Bring further blocks of the prefix from outside the device if that pays; the slot waits for them."""
        if self.storage is None:
            return False
        first = len(matched)
        count = self.storage.worth_loading(request, first, len(keys))
        if not count:
            return False
        self._starts_to_load(slot, request)
        blocks = self.slots.tables[slot, first : first + count]
        self.storage.load(request, slot, keys[first : first + count], blocks, first)
        return True

    def _starts_to_load(self, slot: int, request: Request) -> None:
        request.advance(Event.LOAD)
        self.slots.running[slot], self.slots.loading[slot] = False, True

    def _begin(self, slot: int, request: Request, computed: int, cached: int) -> None:
        """A request begins to run with the KV of `computed` tokens in place; `cached` of them were there before it."""
        slots = self.slots
        slots.computed[slot] = slots.settled[slot] = computed
        if self.drafts is not None:
            self.drafts.admit(slot)
        known = int(slots.known[slot])
        if request.cached_tokens is None and not request.spec.delivered:
            self.counters.prompt_tokens += known
        else:
            self.counters.recomputed_tokens += known - computed
            if request.preemptions:
                self._return_cost.observe(known - computed, known)
        if request.cached_tokens is None:
            request.cached_tokens = cached
        if self.prefixes.hasher is not None:
            self.counters.prefix_queries += known
            self.counters.prefix_hits += cached
        self._send_settled(slot, request)

    def _choose_victim(self) -> int:
        return self._victims.choose(self.slots, self._policy.expendable(self.slots, np.flatnonzero(self.slots.running)))

    def _growth_with(self, request: Request, length: int) -> int:
        """Return the blocks that running requests and this one will soon need beyond today's."""
        slots = self.slots
        rows = np.flatnonzero(slots.running | slots.loading)
        if not len(rows):
            return 0
        lengths = np.append(slots.length[rows], np.int32(length))
        blocks = np.append(slots.num_blocks[rows], np.int32(-(-length // self.limits.block_size)))
        prompts = np.append(slots.prompt_len[rows], np.int32(len(request.spec.prompt)))
        limits = np.append(slots.limit[rows], np.int32(request.limit))
        remaining = self._forecast.remaining(lengths - prompts, limits - prompts)
        horizon = self._return_cost.horizon(length, self.limits.block_size)
        return peak_growth(lengths, blocks, np.minimum(remaining, horizon), self.limits.block_size)

    def _preempt(self, slot: int, draft: PlanBuilder) -> None:
        request = self.slots.requests[slot]
        if request is None:
            raise RuntimeError(f"the policy chose slot {slot}, which is empty")
        request.preemptions += 1
        self.counters.preemptions += 1
        draft.preempted = True
        if self.storage is not None and self.storage.keep.preempted:
            self._save(slot, request)
        self._take_back(request, draft)

    def _take_back(self, request: Request, draft: PlanBuilder) -> None:
        """Stop a running slot; it keeps its place until its -9, its blocks go to the pool, fenced."""
        slot = self._slot_of(request)
        request.advance(Event.TAKE_BACK)
        self._give_up_blocks(slot, request)
        self.slots.running[slot] = False
        self.slots.draining[slot] = True
        draft.take_back(slot, int(self.slots.gen[slot]))

    def _seal(self, draft: PlanBuilder, budget: Budget) -> StepPlan:
        """Fix the plan and account for it."""
        plan = draft.build(self.slots)
        slots, rows = self.slots, plan.slots
        slots.computed[rows] += plan.num_tokens
        slots.length[rows] += plan.samples + plan.num_drafts
        slots.last_step[rows] = plan.step
        if self.drafts is not None and self.limits.pipeline_depth > 1:
            # Until the answer tells, the runner may hold as many drafts as it can.
            slots.drafts_ready[rows[plan.samples]] = self.limits.max_drafts
        self._step += 1
        self.counters.steps += 1
        self.counters.budget_used += budget.used
        self.counters.budget_limit += self.limits.max_num_batched_tokens
        return plan

    # What became of a step --------------------------------------------------------------------------------

    def set_back(self, rows: npt.NDArray[np.intp], rejected: IntArray) -> None:
        """Drafts of `rows` were rejected, int32[n]: neither they nor their KV exist."""
        self.slots.length[rows] -= rejected
        self.slots.computed[rows] -= rejected

    def drafts_are_ready(self, ready: IntArray, step: int) -> None:
        """The runner holds `ready` int32[num_slots] drafts after `step`; slots scheduled since then have newer ones."""
        current = self.slots.last_step <= step
        self.slots.drafts_ready[current] = ready[current]

    def settle(self, rows: npt.NDArray[np.intp], upto: IntArray) -> None:
        """The KV of `rows` is settled below positions `upto` int32[n]: name the blocks that this completes."""
        slots = self.slots
        slots.settled[rows] = upto
        if self.prefixes.hasher is None:
            return
        for slot in rows[upto // self.limits.block_size > slots.registered[rows]].tolist():
            self._register(slot, int(slots.settled[slot]) // self.limits.block_size)

    def _register(self, slot: int, upto: int) -> None:
        """Name a slot's blocks below entry `upto` of its table, which are settled."""
        slots = self.slots
        request = slots.requests[slot]
        if request is not None:
            first = int(slots.registered[slot])
            self.prefixes.complete(request, slots.tokens[slot], slots.tables[slot], first, upto)
            slots.registered[slot] = upto
            self._send_settled(slot, request)

    def _send_settled(self, slot: int, request: Request) -> None:
        """Send the settled blocks of a request that computes its prompt for another worker."""
        if self.transfers is not None and request.spec.prefill_job is not None:
            self.transfers.settled(request, self.slots.blocks(slot)[: int(self.slots.registered[slot])])

    def finish(self, slot: int, reason: FinishReason) -> None:
        """The request in `slot` has delivered its last token.

        A running slot is free at once: what is in flight for it belongs to an old gen. A draining slot follows on
        its -9.
        """
        request = self.slots.requests[slot]
        if request is None or request.ended is not None:
            raise RuntimeError(f"slot {slot} has no request to finish")
        prompt = len(request.spec.prompt)
        self._forecast.observe(int(self.slots.known[slot]) - prompt, request.limit - prompt)
        if request.state is State.DRAINING:
            self.slots.ended[slot] = True
            self._forget(request, reason)
            return
        request.advance(Event.FINISH)
        if self.storage is not None and self.storage.keep.finished:
            self._save(slot, request)
        if self.transfers is not None:
            self.transfers.finished(request, self.slots.blocks(slot), reason)
        self._give_up_blocks(slot, request)
        self.slots.vacate(slot)
        self._forget(request, reason)

    def released(self, slot: int) -> Request:
        """The -9 of a draining slot arrived; return its request.

        It is waiting again (preempted), or ended (aborted, or its last token arrived while it drained).
        """
        request = self.slots.requests[slot]
        if request is None or not self.slots.draining[slot]:
            raise RuntimeError(f"slot {slot} was released but not taken back")
        request.generated = self.slots.generated(slot)
        request.slot = None
        self.slots.vacate(slot)
        if request.ended is not None:
            request.advance(Event.RELEASED_ENDED)
        elif request.abort_wanted:
            request.advance(Event.RELEASED_ABORTED)
            self._forget(request, FinishReason.ABORT)
        else:
            request.advance(Event.RELEASED_PREEMPTED)
            self._wait(request)
        return request

    def answered(self, step: int) -> None:
        """The output of `step` arrived; blocks fenced by it come free."""
        self.pool.answered(step)

    # KV outside the device ----------------------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        """Return what is to be done with KV outside steps since the last call, in order."""
        return [] if self.storage is None else self.storage.take_effects()

    def completed(self, completion: Completion) -> None:
        """An effect was performed, or something was learnt about KV outside the device."""
        if self.storage is None:
            return
        match completion:
            case Found():
                self.storage.found(completion)
            case Saved():
                self.storage.saved(completion)
            case Loaded():
                arrival = self.storage.loaded(completion)
                if arrival is not None:
                    self._arrive(arrival)
            case NotStored(keys):
                self.storage.not_stored(keys)
            case LoadPaceMeasured() | PrefillPaceMeasured():
                self.storage.tradeoff.measured(completion)

    def transferred(self, answer: Transferred) -> None:
        """An effect of `transfers` was performed."""
        if self.transfers is None:
            raise RuntimeError("no KV is exchanged with other workers, but a transfer completed")
        arrival = self.transfers.completed(answer)
        if arrival is not None:
            self._arrive(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        """A slot's load is over: what came is settled, the rest is computed."""
        slot, request, slots = arrival.slot, arrival.request, self.slots
        request.advance(Event.LOADED)
        slots.loading[slot], slots.running[slot] = False, True
        self._register(slot, arrival.tokens // self.limits.block_size)
        self._begin(slot, request, arrival.tokens, arrival.cached)
        self._arrived.append(slot)

    def _abort_loading(self, request: Request) -> None:
        """The runner never heard of this stay: slot and request are free at once, the blocks when the load is over."""
        slot = self._slot_of(request)
        if self.storage is not None:
            self.storage.abandon(request)
        if self.transfers is not None:
            self.transfers.abandon(request)
        request.advance(Event.ABORT_LOADING)
        self._give_up_blocks(slot, request)
        self.slots.vacate(slot)
        self._forget(request, FinishReason.ABORT)

    def _save(self, slot: int, request: Request) -> None:
        """Have the settled blocks of a request that leaves its slot copied while they still have an owner."""
        complete = int(self.slots.registered[slot])
        if self.storage is not None and complete:
            self.storage.save(request.chain[:complete], self.slots.blocks(slot)[:complete])

    # Inside -----------------------------------------------------------------------------------------------

    def _wait(self, request: Request) -> None:
        """Queue a request, and ask what of its prefix is held outside the device."""
        self.waiting.push(request)
        if self.storage is not None and not self._is_prefilled_elsewhere(request):
            self.storage.ask(request, self.prefixes.keys(request, request.known_tokens()))

    def _ask_after_all(self, request: Request, keys: list[bytes]) -> bool:
        if self.storage is None or self._is_prefilled_elsewhere(request):
            return False
        return self.storage.ask_after_all(request, keys)

    def _is_prefilled_elsewhere(self, request: Request) -> bool:
        return self.transfers is not None and self.transfers.wants(request)

    def _slot_of(self, request: Request) -> int:
        if request.slot is None:
            raise RuntimeError(f"request {request.spec.request_id!r} holds no slot")
        return request.slot

    def _give_up_blocks(self, slot: int, request: Request) -> None:
        slots = self.slots
        self.pool.release(slots.blocks(slot), int(slots.last_step[slot]))
        self.prefixes.give_up(request.chain[int(slots.registered[slot]) :])
        slots.num_blocks[slot] = 0

    def _forget(self, request: Request, reason: FinishReason) -> None:
        request.ended = reason
        del self._requests[request.spec.request_id]
        if self.transfers is not None:
            self.transfers.ended(request, reason)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if slots, requests and blocks contradict each other."""
        slots = self.slots
        states = slots.running.astype(np.int8) + slots.loading + slots.draining
        if (states != np.array([request is not None for request in slots.requests])).any():
            raise RuntimeError("a slot without request is running, loading or draining, or one with is not exactly one")
        self.pool.check_integrity(self._owners())

    def _owners(self) -> Iterable[IntArray]:
        return (self.slots.blocks(int(slot)) for slot in np.flatnonzero(self.slots.running | self.slots.loading))
