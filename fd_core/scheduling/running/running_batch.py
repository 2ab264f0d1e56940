"""Slot occupancy: a request in a slot, from its admission to the release of the slot (`RunningBatch`).

Ownership: a running or loading slot owns the blocks in its table. A preempted, aborted or finished slot returns its
blocks to the pool, fenced by the last step that touches them and pinned while they are copied. A draining slot owns
only its index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.kv.blocks import BlockPool
from fd_core.scheduling.operations.kv_offloading import KVOffloading
from fd_core.scheduling.operations.kv_transferring import KVTransferring
from fd_core.scheduling.phases import PhaseClock
from fd_core.scheduling.prefixes import Prefixes
from fd_core.scheduling.requests import Event, Request, State
from fd_core.scheduling.running.drafts import DraftControl
from fd_core.scheduling.running.plan import PlanBuilder
from fd_core.scheduling.running.slots import SlotTable
from fd_core.scheduling.waiting.admission_control import AdmissionControl
from fd_core.types import FinishReason, IntArray, Phase
from fd_core.types.metrics import counter


class SchedulerCounters(msgspec.Struct, kw_only=True):
    """Counters since the start; monotonic."""

    steps: Annotated[int, counter("steps", "Steps planned.")] = 0
    budget_used: Annotated[int, counter("budget_used_tokens", "Tokens computed, over all steps.")] = 0
    budget_limit: Annotated[
        int, counter("budget_limit_tokens", "Tokens that the step budgets allowed, over all steps.")
    ] = 0
    prompt_tokens: Annotated[
        int, counter("prompt_tokens", "Prompt tokens of the requests admitted.", vllm=("prompt_tokens",))
    ] = 0
    preemptions: Annotated[
        int,
        counter(
            "preemptions", "Requests preempted to free KV blocks for others, or by a pause.", vllm=("num_preemptions",)
        ),
    ] = 0
    recomputed_tokens: Annotated[
        int, counter("recomputed_tokens", "Tokens computed a second time after a preemption.")
    ] = 0
    prefix_queries: Annotated[
        int,
        counter(
            "prefix_queries_tokens", "Prompt tokens looked up in the prefix cache.", vllm=("prefix_cache_queries",)
        ),
    ] = 0
    prefix_hits: Annotated[
        int, counter("prefix_hits_tokens", "Prompt tokens found in the prefix cache.", vllm=("prefix_cache_hits",))
    ] = 0


@dataclass
class RunningBatch:
    """Slots with their requests and blocks; owned by one scheduler."""

    slots: SlotTable
    _pool: BlockPool
    _prefixes: Prefixes
    _offloading: KVOffloading
    _transferring: KVTransferring
    _drafts: DraftControl
    _control: AdmissionControl
    _times: PhaseClock
    _on_end: Callable[[Request, FinishReason], None]
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    kv_loaded: list[int] = field(default_factory=list)
    """Slots whose KV arrived; the next plan notifies the runner of them."""

    def load(self, slot: int, phase: Phase) -> None:
        """Begin to load the KV of a request, from the source that `phase` names; the slot waits for it."""
        request = self.slots.request_in(slot)
        request.advance(Event.LOAD)
        self._times.enter(request.times, phase)
        self.slots.load(slot)

    def run(self, slot: int, request: Request, num_computed: int, num_cached: int) -> None:
        """Start a request with the KV of `num_computed` tokens in place, `num_cached` of which were cached before."""
        slots, counters = self.slots, self.counters
        self._times.enter(request.times, Phase.COMPUTING)
        slots.run(slot, num_computed)
        params = request.spec.params
        forced = params.grammar is not None or params.reasoning is not None
        if forced or self._drafts.possible:
            self._drafts.admit(slot, forced)
        request.stored = request.stored_on_host = 0
        num_tokens = int(slots.num_tokens[slot])
        if request.cached_tokens is None and not request.spec.delivered:
            counters.prompt_tokens += num_tokens
        else:
            counters.recomputed_tokens += num_tokens - num_computed
            if request.preemptions:
                self._control.return_cost.observe(num_tokens - num_computed, num_tokens)
        if request.cached_tokens is None:
            request.cached_tokens = num_cached
        if self._prefixes.hasher is not None:
            counters.prefix_queries += num_tokens
            counters.prefix_hits += num_cached
        if request.spec.prefill_job is not None:
            self._send_settled(slot, request)

    def finish_load(self, request: Request, num_tokens: int, num_cached: int) -> None:
        """Apply loaded KV of the leading `num_tokens`; compute the rest. No prefill for it computed `num_cached`."""
        slot = slot_of(request)
        request.advance(Event.LOADED)
        if self.slots.groups.sliding:
            self._pool.release(self.slots.arrive(slot, num_tokens), -1)
        arrived = num_tokens // self.slots.block_size
        self._register(slot, request, arrived)
        if not request.announced:
            self._prefixes.announce(request, arrived, len(self._prefixes.keys(request)))
        self.run(slot, request, num_tokens, num_cached)
        self.kv_loaded.append(slot)

    def settle(self, rows: npt.NDArray[np.intp], upto: IntArray, step: int) -> None:
        """Settle the KV of slots `rows` below `upto` int32[n], which `step` or one before it computed.

        Registers the blocks that are complete now, and gives up those that no later step reads.
        """
        slots = self.slots
        blocks = upto // slots.block_size
        completed = blocks > slots.num_registered[rows]
        if not np.count_nonzero(completed):
            return
        leaving, slides = list[IntArray](), slots.groups.sliding > 0
        for slot, count in zip(rows[completed].tolist(), blocks[completed].tolist(), strict=True):
            request = slots.request_in(slot)
            self._register(slot, request, count)
            if request.spec.prefill_job is not None:
                self._send_settled(slot, request)
            if slides and (taken := slots.slide(slot, count * slots.block_size)) is not None:
                leaving.append(taken)
        if leaving:
            self._pool.release(np.concatenate(leaving), step)

    def _register(self, slot: int, request: Request, upto: int) -> None:
        """Register the settled blocks of a slot below entry `upto` of its table."""
        slots = self.slots
        self._prefixes.complete(request, slots.tables[:, slot], int(slots.num_registered[slot]), upto)
        slots.register(slot, upto)

    def _send_settled(self, slot: int, request: Request) -> None:
        """Send the settled blocks of a request that computes its prompt for another worker."""
        self._transferring.settled(request, self.slots.tables[:, slot], int(self.slots.num_registered[slot]))

    def preempt(self, slot: int, builder: PlanBuilder) -> None:
        """Preempt a running slot for a pause or for its blocks; its request waits again once the slot is released."""
        slots, request = self.slots, self.slots.request_in(slot)
        request.preemptions += 1
        self._times.enter(request.times, Phase.PREEMPTED)
        self.counters.preemptions += 1
        builder.preempted = True
        if self._offloading.keep.preempted:
            request.save = self._offloading.save(request, slots.tables[:, slot], int(slots.num_registered[slot]))
        self.revoke(slot, request, builder)

    def revoke(self, slot: int, request: Request, builder: PlanBuilder) -> None:
        """Stop a running slot; it stays occupied until its -9, its blocks go to the pool, fenced."""
        request.advance(Event.REVOKE)
        self._give_up_blocks(slot, request)
        self.slots.drain(slot)
        builder.revoke(slot, int(self.slots.gen[slot]))

    def finish(self, slot: int, request: Request, reason: FinishReason) -> None:
        """Free the slot of a request that delivered its last token: a running one at once, a draining one on its -9."""
        if request.ended is not None:
            raise RuntimeError(f"slot {slot} has no request to finish")
        slots = self.slots
        generated = int(slots.num_tokens[slot]) - request.prompt_len
        self._control.forecast.observe(generated, request.limit - request.prompt_len)
        if request.state is State.DRAINING:
            slots.end(slot)
            self._on_end(request, reason)
            return
        request.advance(Event.FINISH)
        if self._offloading.keep.finished and slots.groups.whole:  # a lookup finds prefixes of such groups
            self._offloading.save(request, slots.tables[:, slot], int(slots.num_registered[slot]))
        if request.spec.prefill_job is not None:
            self._transferring.finished(request, slots.tables[:, slot], reason)
        self._give_up_blocks(slot, request)
        slots.vacate(slot)
        self._on_end(request, reason)

    def release(self, slot: int) -> Request:
        """Free a draining slot on its -9; return its request, which waits again (preempted) or has ended."""
        request = self.slots.request_in(slot)
        if not self.slots.draining[slot]:
            raise RuntimeError(f"slot {slot} was released, but was neither preempted nor aborted")
        self.slots.vacate(slot)
        if request.ended is not None:
            request.advance(Event.RELEASED_ENDED)
        elif request.abort_requested:
            request.advance(Event.RELEASED_ABORTED)
            self._on_end(request, FinishReason.ABORT)
        else:
            request.advance(Event.RELEASED_PREEMPTED)
        return request

    def abort_loading(self, request: Request) -> None:
        """Free slot and request at once, since the runner was never notified of them, and the blocks when their
        operation ends.
        """
        self._offloading.cancel(request)
        self._transferring.cancel(request)
        request.advance(Event.ABORT_LOADING)
        slot = slot_of(request)
        self._give_up_blocks(slot, request)
        self.slots.vacate(slot)
        self._on_end(request, FinishReason.ABORT)

    def _give_up_blocks(self, slot: int, request: Request) -> None:
        slots = self.slots
        self._pool.release(slots.take_blocks(slot), int(slots.last_step[slot]))
        if request.announced:
            self._prefixes.give_up(request, int(slots.num_registered[slot]))

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if slots, requests and blocks contradict each other."""
        slots = self.slots
        states = slots.running.astype(np.int8) + slots.loading + slots.draining
        if (states != np.array([request is not None for request in slots.requests])).any():
            raise RuntimeError(
                "a free slot is running, loading or draining, or an occupied one is not in exactly one of these states"
            )
        for slot, request in enumerate(slots.requests):
            if request is not None and (request.slot != slot or request.num_tokens != slots.num_tokens[slot]):
                raise RuntimeError(f"slot {slot} and its request disagree about the slot or the number of tokens")
        self._pool.check_integrity(slots.owned(int(slot)) for slot in np.flatnonzero(slots.running | slots.loading))


def slot_of(request: Request) -> int:
    """Return the slot of a request. Raises `RuntimeError` if it holds none."""
    if request.slot is None:
        raise RuntimeError(f"request {request.spec.request_id!r} holds no slot")
    return request.slot
