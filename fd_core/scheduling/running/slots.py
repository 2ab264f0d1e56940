"""The slot table: the scheduler's state of each slot, as arrays, so that a step costs a few vector operations.

For a running slot, with steps in flight:

    0 ........ num_computed ....... num_planned ......... limit
        num_tokens <= num_planned     tokens that exist once every step in flight has an output
      KV exists or is in flight below `num_computed`; `num_planned - num_computed` tokens wait for a step:
      one token is a decode, more are a prefill.

Drafts in flight count as accepted; `num_planned` and `num_computed` are reduced when some were rejected.
"""

from __future__ import annotations

from itertools import repeat
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.scheduling.requests import Request
from fd_core.scheduling.running.tokens import DeliveredTokens
from fd_core.scheduling.victims import RunningRequests
from fd_core.types import BlockGrant, IntArray, StepPlan
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

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, groups: LayerGroups = ONE_GROUP) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.groups = groups
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
        self.drafts_ready = np.zeros(num_slots, np.int32)
        """Drafts that the runner holds for the next step, or may hold by then."""
        self.limit = np.zeros(num_slots, np.int32)
        self.prompt_len = np.zeros(num_slots, np.int32)
        self.num_blocks = np.zeros(num_slots, np.int32)
        """Entries of the block tables, of sliding groups as well once their tokens are computed."""
        self.sliding_begin = np.zeros(num_slots, np.int32)
        """First entry that a slot still owns of the table of a sliding group."""
        self.sliding_end = np.zeros(num_slots, np.int32)
        """Entries so far of the tables of sliding groups."""
        self.num_registered = np.zeros(num_slots, np.int32)
        """Leading blocks that were offered to the prefix index."""
        self.last_step = np.full(num_slots, -1, np.int64)
        self.stops = np.full((num_slots, 1), NO_CHOICE, np.int32)
        """Token ids that end the request; widened when a request has more."""
        self.tables = np.zeros((groups.count, num_slots, -(-max_model_len // block_size)), np.int32)
        """Block tables of each group: the first `num_blocks` entries of a row, or, of a sliding group, those from
        `sliding_begin` to `sliding_end`."""

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

    def occupy(self, slot: int, request: Request, matched: IntArray, blocks: IntArray, sliding_end: int = 0) -> None:
        """Occupy a slot under a new gen: it owns the known prefix, `matched`, and the `blocks` after it.

        `matched` is what `Prefixes.match` returns. `blocks` are those of each group for all tokens, of sliding groups
        up to entry `sliding_end`.
        """
        spec, matched = request.spec, np.atleast_2d(matched)
        known, count = matched.shape[1], -(-request.tokens.taken // self.block_size)
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
        self.num_computed[slot] = 0
        self.limit[slot] = request.limit
        self.prompt_len[slot] = request.prompt_len
        groups = self.groups
        self.tables[:, slot, :known] = matched
        own = groups.whole * (count - known)
        self.tables[: groups.whole, slot, known:count] = blocks[:own].reshape(groups.whole, count - known)
        if groups.sliding:
            self.tables[groups.whole :, slot, known:sliding_end] = blocks[own:].reshape(
                groups.sliding, sliding_end - known
            )
            self.sliding_begin[slot] = groups.first_kept(known * self.block_size, self.block_size)
            self.sliding_end[slot] = sliding_end
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
        self.num_computed[slot] = num_computed

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
        """Return all blocks of a slot in sequence order, which then owns none."""
        blocks = self.owned(slot)
        self.num_blocks[slot] = self.sliding_begin[slot] = self.sliding_end[slot] = 0
        return blocks

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

    def room(self, rows: npt.NDArray[np.intp]) -> IntArray:
        """Return int32[n]: positions after `num_computed` that the blocks of each of the slots `rows` have room for."""
        entries = self.num_blocks[rows]
        if self.groups.sliding:
            entries = np.minimum(entries, self.sliding_end[rows])
        room: IntArray = entries * self.block_size - self.num_computed[rows]
        return room

    def missing(self, rows: npt.NDArray[np.intp]) -> IntArray:
        """Return int32[n]: blocks that each of the slots `rows` needs for its next entry in every table.

        While a prompt is computed, it already has all its blocks of the other groups than the sliding ones.
        """
        groups = self.groups
        if not groups.sliding:
            return np.full(len(rows), groups.whole, np.int32)
        ahead = self.sliding_end[rows] < self.num_blocks[rows]
        return np.where(ahead, groups.sliding, groups.count).astype(np.int32)

    def extend(self, rows: npt.NDArray[np.intp], blocks: IntArray) -> list[BlockGrant]:
        """Extend the tables of the slots `rows` by one entry each, with `missing` of `blocks` for each slot in turn."""
        groups, first = self.groups, 0
        ends = self.sliding_end if groups.sliding else self.num_blocks
        entries = ends[rows]
        if groups.sliding and np.count_nonzero(entries < self.num_blocks[rows]):
            if len(rows) > 1:
                parts = np.split(blocks, self.missing(rows).cumsum()[:-1])
                return [each for row, part in zip(rows[:, None], parts, strict=True) for each in self.extend(row, part)]
            first = groups.whole
        else:
            self.num_blocks[rows] += 1
        ends[rows] = entries + 1
        count = len(self.tables) - first
        self.tables[first:, rows, entries] = blocks.reshape(-1, count).T
        if count == 1:
            return [*map(BlockGrant, rows.tolist(), entries.tolist(), blocks[:, None], repeat(first))]
        places = rows.repeat(count).tolist(), entries.repeat(count).tolist()
        return [*map(BlockGrant, *places, blocks[:, None], [*range(first, first + count)] * len(rows))]

    def arrive(self, slot: int, num_tokens: int) -> IntArray:
        """Move the sliding blocks after the known prefix to where they were loaded for, with KV of `num_tokens` tokens.

        Returns the sliding blocks of the known prefix that no token reads any more.
        """
        known, sliding = int(self.num_registered[slot]), self.tables[self.groups.whole :, slot]
        first, end = int(self.sliding_begin[slot]), int(self.sliding_end[slot])
        begin = self.groups.first_kept(num_tokens, self.block_size)
        unread: IntArray = sliding[:, first : min(begin, known)].T.flatten()
        if (moved := begin - known) > 0:
            sliding[:, begin : end + moved] = sliding[:, known:end].copy()
            sliding[:, known:begin] = -1
            end += moved
        self.sliding_begin[slot], self.sliding_end[slot] = begin, end
        return unread

    def slide(self, slot: int, upto: int) -> IntArray | None:
        """Take the sliding blocks that a slot with settled KV below `upto` need not keep; None if there are none."""
        first, begin = int(self.sliding_begin[slot]), self.groups.first_kept(upto, self.block_size)
        if begin <= first:
            return None
        self.sliding_begin[slot] = begin
        return self.tables[self.groups.whole :, slot, first:begin].T.ravel()

    def num_leaving(self) -> int:
        """Return how many blocks of sliding groups running slots give up when the steps in flight have outputs."""
        rows = np.flatnonzero(self.running)
        begin = self.groups.first_kept(self.num_computed[rows], self.block_size)
        return self.groups.sliding * int(np.maximum(begin - self.sliding_begin[rows], 0).sum())

    def num_owned(self, rows: npt.NDArray[np.intp]) -> IntArray:
        """Return int32[n]: number of blocks of each of the slots `rows`."""
        groups = self.groups
        sliding = (self.sliding_end[rows] - self.sliding_begin[rows]) * groups.sliding
        owned: IntArray = self.num_blocks[rows] * groups.whole + sliding
        return owned

    def owned(self, slot: int) -> IntArray:
        """Return all blocks of a slot in sequence order."""
        count, groups = int(self.num_blocks[slot]), self.groups
        table = self.tables[:, slot, :count].T
        if groups.sliding:
            entries = np.arange(count)
            held = (entries >= self.sliding_begin[slot]) & (entries < self.sliding_end[slot])
            mine = np.ones(table.shape, np.bool_)
            mine[:, groups.whole :] = held[:, None]
            return table[mine]
        return table.flatten()

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
