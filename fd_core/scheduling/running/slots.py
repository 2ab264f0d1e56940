"""The slot table: the scheduler's state of each slot, as arrays, so that a step costs a few vector operations.

For a running slot, with steps in flight:

    0 ........ num_computed ....... num_planned ......... limit
        num_tokens <= num_planned     tokens that exist once every step in flight has an output
      KV exists or is in flight below `num_computed`; `num_planned - num_computed` tokens wait for a step:
      one token is a decode, more are a prefill.

Drafts in flight count as accepted; `num_planned` and `num_computed` are reduced when some were rejected.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.scheduling.requests import Request
from fd_core.scheduling.running.tokens import DeliveredTokens
from fd_core.scheduling.victims import RunningRequests
from fd_core.types import IntArray, StepPlan
from fd_core.types.metrics import gauge

NO_CHOICE = np.iinfo(np.int32).max
"""Fills unused entries of a slot's stop list; no vocabulary is that large."""


class SlotStats(msgspec.Struct, frozen=True, kw_only=True):
    """Requests at one moment."""

    running: Annotated[
        int, gauge("requests_running", "Requests that hold a slot and compute.", vllm=("num_requests_running",))
    ] = 0
    loading: Annotated[
        int, gauge("requests_loading", "Requests that hold a slot and wait for KV from outside the device.")
    ] = 0
    draining: Annotated[
        int,
        gauge(
            "slots_draining",
            "Preempted or aborted slots whose release the runner has not acknowledged.",
            old=("take_backs_in_flight",),
        ),
    ] = 0
    waiting: Annotated[
        int, gauge("requests_waiting", "Requests that wait for a slot.", vllm=("num_requests_waiting",))
    ] = 0


class SlotTable:
    """Columns over `num_slots` slots; private to one scheduler, read by its parts and written here alone."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.requests: list[Request | None] = [None] * num_slots
        self.names = [""] * num_slots
        """Id of the request in each slot, or of the last one."""
        self.membership = 0
        """Changes whenever a slot starts or stops running, or has fewer tokens planned."""
        self.running = np.zeros(num_slots, np.bool_)
        self.loading = np.zeros(num_slots, np.bool_)
        """Slots whose KV is being loaded from outside the device; the runner was not notified of them yet."""
        self.draining = np.zeros(num_slots, np.bool_)
        self.num_draining = 0
        self.gen = np.zeros(num_slots, np.int32)
        self.delivering_gen = np.full(num_slots, -1, np.int32)
        """The gen whose outputs are delivered; -1 for a free slot, and after the end of a request that still drains."""
        self.awaits_first = np.zeros(num_slots, np.bool_)
        """True while no token of the request was delivered."""
        self.arrival = np.zeros(num_slots, np.int64)
        """Order of arrival of the request; the largest is the youngest."""
        self.priority = np.zeros(num_slots, np.int64)
        self.preempted_before = np.zeros(num_slots, np.bool_)
        self.num_at_admission = np.zeros(num_slots, np.int32)
        self.num_tokens = np.zeros(num_slots, np.int32)
        """Prompt and delivered tokens."""
        self._delivered = DeliveredTokens(num_slots)
        self.num_planned = np.zeros(num_slots, np.int32)
        self.num_computed = np.zeros(num_slots, np.int32)
        self.num_settled = np.zeros(num_slots, np.int32)
        """Positions whose KV was computed by a step with an output."""
        self.drafts_ready = np.zeros(num_slots, np.int32)
        """Drafts that the runner holds for the next step, or may hold by then."""
        self.limit = np.zeros(num_slots, np.int32)
        self.prompt_len = np.zeros(num_slots, np.int32)
        self.num_blocks = np.zeros(num_slots, np.int32)
        self.num_registered = np.zeros(num_slots, np.int32)
        """Leading blocks that were offered to the prefix index."""
        self.last_step = np.full(num_slots, -1, np.int64)
        self.stops = np.full((num_slots, 1), NO_CHOICE, np.int32)
        """Token ids that end the request; widened when a request has more."""
        self.tables = np.zeros((num_slots, -(-max_model_len // block_size)), np.int32)
        """Block tables; the first `num_blocks` entries of a row are valid."""

    def free_slot(self) -> int | None:
        """Return the lowest slot that holds no request."""
        free = ~(self.running | self.loading | self.draining)
        slot = int(free.argmax())
        return slot if free[slot] else None

    @property
    def occupied(self) -> npt.NDArray[np.bool_]:
        """bool[num_slots]: True if a request is in the slot, in any state."""
        return self.running | self.loading | self.draining

    def request_in(self, slot: int) -> Request:
        """Return the request in a slot. Raises `RuntimeError` if the slot is free."""
        request = self.requests[slot]
        if request is None:
            raise RuntimeError(f"slot {slot} is empty")
        return request

    def occupy(self, slot: int, request: Request, matched: IntArray, blocks: IntArray) -> None:
        """Occupy a slot under a new gen: it owns the known prefix, `matched`, and the `blocks` after it."""
        spec, known, count = request.spec, len(matched), len(matched) + len(blocks)
        self.requests[slot] = request
        self.names[slot] = spec.request_id
        request.slot = slot
        request.tokens.attach(self._delivered, slot)
        self.running[slot] = True
        self.membership += 1
        self.gen[slot] += 1
        self.delivering_gen[slot] = self.gen[slot]
        self.awaits_first[slot] = not request.delivered_first
        self.arrival[slot] = request.arrival
        self.priority[slot] = spec.priority
        self.preempted_before[slot] = request.preemptions > 0
        # Before it is in the slot, every token of a request is in its own buffer.
        self.num_at_admission[slot] = self.num_tokens[slot] = self.num_planned[slot] = request.tokens.taken
        self.num_computed[slot] = self.num_settled[slot] = 0
        self.limit[slot] = request.limit
        self.prompt_len[slot] = request.prompt_len
        self.tables[slot, :known] = matched
        self.tables[slot, known:count] = blocks
        self.num_blocks[slot], self.num_registered[slot], self.drafts_ready[slot] = count, known, 0
        self.last_step[slot] = -1
        params = spec.params
        ids = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *spec.eos_token_ids)
        if len(ids) > self.stops.shape[1]:
            wider = np.full((self.num_slots, len(ids)), NO_CHOICE, np.int32)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = NO_CHOICE
        self.stops[slot, : len(ids)] = ids

    def load(self, slot: int) -> None:
        """Mark a slot as loading its KV from outside the device."""
        self.running[slot], self.loading[slot] = False, True
        self.membership += 1

    def run(self, slot: int, num_computed: int) -> None:
        """Start computing in a slot, after `num_computed` positions whose KV is in place."""
        self.running[slot], self.loading[slot] = True, False
        self.membership += 1
        self.num_computed[slot] = self.num_settled[slot] = num_computed

    def drain(self, slot: int) -> None:
        """Mark a preempted or aborted slot as draining: it stays occupied until its -9."""
        self.running[slot], self.draining[slot] = False, True
        self.num_draining += 1
        self.membership += 1

    def end(self, slot: int) -> None:
        """Record that the client of a draining slot received the end."""
        self.delivering_gen[slot] = -1

    def deliver_first(self, slot: int) -> None:
        """Record that the first token was delivered to the request in a slot."""
        self.request_in(slot).delivered_first = True
        self.awaits_first[slot] = False

    def take_blocks(self, slot: int) -> IntArray:
        """Return the block table of a slot, which then owns no block."""
        table: IntArray = self.tables[slot, : self.num_blocks[slot]].copy()
        self.num_blocks[slot] = 0
        return table

    def vacate(self, slot: int) -> None:
        """Free a slot; the gen stays, so that late outputs are recognised."""
        request = self.requests[slot]
        if request is not None:
            request.slot = None
            request.tokens.detach()
        self.requests[slot] = None
        self.num_draining -= int(self.draining[slot])
        self.running[slot] = self.loading[slot] = self.draining[slot] = False
        self.delivering_gen[slot] = -1
        self.membership += 1

    def schedule(self, rows: npt.NDArray[np.intp], plan: StepPlan) -> None:
        """Advance the slots `rows` by a plan, counting all of their drafts as accepted."""
        self.num_computed[rows] = plan.starts + plan.num_tokens
        self.num_planned[rows] += plan.samples + plan.num_drafts
        self.last_step[rows] = plan.step

    def hold_drafts(self, rows: npt.NDArray[np.intp], drafts: IntArray) -> None:
        """Record that the runner holds, or may hold, `drafts` int32[n] for the slots `rows`."""
        self.drafts_ready[rows] = drafts

    def rollback_drafts(self, rows: npt.NDArray[np.intp], rejected: IntArray) -> None:
        """Subtract `rejected` int32[n] drafts of the slots `rows`: neither they nor their KV exist."""
        self.membership += 1
        self.num_planned[rows] -= rejected
        self.num_computed[rows] -= rejected

    def settle(self, rows: npt.NDArray[np.intp], upto: IntArray) -> None:
        """Mark the KV of the slots `rows` as settled below positions `upto` int32[n]."""
        self.num_settled[rows] = upto

    def register(self, slot: int, upto: int) -> None:
        """Record that the leading `upto` blocks of a slot were offered to the prefix index."""
        self.num_registered[slot] = max(upto, int(self.num_registered[slot]))

    def append_tokens(self, rows: npt.NDArray[np.intp], tokens: IntArray, counts: IntArray) -> None:
        """Append to the request in each of the slots `rows` the first `counts` int32[n] of `tokens` int32[n, width]."""
        if tokens.shape[1] > self._delivered.min_free_columns:
            for slot in self._delivered.full_rows(rows, tokens.shape[1]):
                self.request_in(slot).tokens.take_delivered()
        self._delivered.append(rows, tokens, counts)
        self.num_tokens[rows] += counts

    def append_block(self, rows: npt.NDArray[np.intp], blocks: IntArray) -> IntArray:
        """Extend the table of each of the slots `rows` by one of `blocks` int32[n]; return its entries, int32[n]."""
        entries: IntArray = self.num_blocks[rows]
        self.tables[rows, entries] = blocks
        self.num_blocks[rows] = entries + 1
        return entries

    def blocks(self, slot: int, first: int = 0, upto: int | None = None) -> IntArray:
        """Return a copy of the slot's block table, or of its entries `first` to `upto`."""
        end = int(self.num_blocks[slot]) if upto is None else upto
        table: IntArray = self.tables[slot, first:end].copy()
        return table

    def ready(self) -> npt.NDArray[np.intp]:
        """Return the running slots that have something to compute."""
        return (self.running & (self.num_planned < self.limit)).nonzero()[0]

    def running_requests(self) -> RunningRequests:
        """Return the view of the running requests for victim policies."""
        rows = np.flatnonzero(self.running)
        return RunningRequests(
            rows,
            self.arrival[rows],
            self.priority[rows],
            num_tokens=self.num_planned[rows],
            num_gained=self.num_tokens[rows] - self.num_at_admission[rows],
            preempted_before=self.preempted_before[rows],
            block_size=self.block_size,
        )
