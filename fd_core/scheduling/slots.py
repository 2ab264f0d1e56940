"""The slot table: what the scheduler knows of each slot, as arrays, so that a step costs a few vector operations.

For a running slot, with steps in flight:

    0 ........ computed ....... planned length ......... limit
      known <= length           tokens that exist once every step in flight is answered
      KV exists or is in flight below `computed`; `length - computed` tokens wait for a step:
      one of them is a decode, more are a prefill.

Drafts in flight are counted as if all were kept; `length` and `computed` are set back when some were not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fd_core.scheduling.requests import Request
from fd_core.types import IntArray

__all__ = ["NO_TOKEN", "SlotTable"]

NO_TOKEN = np.iinfo(np.int32).max
"""Fills unused entries of a slot's stop list; no vocabulary is that large."""


class SlotTable:
    """Columns over `num_slots` slots; mutated by the scheduler and the output side only."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.requests: list[Request | None] = [None] * num_slots
        self.running = np.zeros(num_slots, np.bool_)
        self.loading = np.zeros(num_slots, np.bool_)
        """Slots whose KV is on its way from outside the device; the runner does not know of them yet."""
        self.draining = np.zeros(num_slots, np.bool_)
        self.ended = np.zeros(num_slots, np.bool_)
        """Draining slots whose client was already told the end; what they still deliver is dropped."""
        self.gen = np.zeros(num_slots, np.int32)
        self.arrival = np.zeros(num_slots, np.int64)
        """Order of arrival of the request; the largest is the youngest."""
        self.priority = np.zeros(num_slots, np.int64)
        self.returned = np.zeros(num_slots, np.bool_)
        """Whether the request was preempted before."""
        self.admitted_with = np.zeros(num_slots, np.int32)
        """Tokens known when the stay began."""
        self.known = np.zeros(num_slots, np.int32)
        """Prompt and delivered tokens."""
        self.length = np.zeros(num_slots, np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        self.settled = np.zeros(num_slots, np.int32)
        """Positions whose KV was computed by an answered step."""
        self.drafts_ready = np.zeros(num_slots, np.int32)
        """Drafts that the runner holds for the next step, or may hold by then."""
        self.limit = np.zeros(num_slots, np.int32)
        self.prompt_len = np.zeros(num_slots, np.int32)
        self.num_blocks = np.zeros(num_slots, np.int32)
        self.registered = np.zeros(num_slots, np.int32)
        """Leading blocks that were offered to the prefix index."""
        self.last_step = np.full(num_slots, -1, np.int64)
        """Last step in which the slot was scheduled."""
        self.stops = np.full((num_slots, 1), NO_TOKEN, np.int32)
        """Token ids that end the request; widened when a request brings more."""
        self.tokens = np.empty((num_slots, max_model_len), np.int32)
        self.tables = np.zeros((num_slots, -(-max_model_len // block_size)), np.int32)

    def free_slot(self) -> int | None:
        """Return the lowest slot that nobody is in."""
        free = ~self.occupied
        return int(free.argmax()) if free.any() else None

    @property
    def occupied(self) -> npt.NDArray[np.bool_]:
        """bool[num_slots]: whether a request is in the slot, in whatever state."""
        return self.running | self.loading | self.draining

    def occupy(self, slot: int, request: Request, tokens: IntArray) -> None:
        """Begin a stay: a new gen, no blocks yet, everything still to compute."""
        n = len(tokens)
        self.requests[slot] = request
        self.running[slot] = True
        self.gen[slot] += 1
        self.arrival[slot] = request.arrival
        self.priority[slot] = request.spec.priority
        self.returned[slot] = request.preemptions > 0
        self.admitted_with[slot] = n
        self.known[slot] = self.length[slot] = n
        self.computed[slot] = self.settled[slot] = 0
        self.limit[slot] = request.limit
        self.prompt_len[slot] = len(request.spec.prompt)
        self.num_blocks[slot] = self.registered[slot] = self.drafts_ready[slot] = 0
        self.last_step[slot] = -1
        self.tokens[slot, :n] = tokens
        self._set_stops(slot, request)

    def vacate(self, slot: int) -> None:
        """End a stay; the gen stays so that late outputs are recognised."""
        self.requests[slot] = None
        self.running[slot] = self.loading[slot] = self.draining[slot] = self.ended[slot] = False

    def append_blocks(self, slot: int, blocks: IntArray) -> int:
        """Extend the block table and return the entry at which `blocks` begin."""
        offset = int(self.num_blocks[slot])
        self.tables[slot, offset : offset + len(blocks)] = blocks
        self.num_blocks[slot] = offset + len(blocks)
        return offset

    def blocks(self, slot: int) -> IntArray:
        """Return a copy of the slot's block table."""
        table: IntArray = self.tables[slot, : self.num_blocks[slot]].copy()
        return table

    def generated(self, slot: int) -> IntArray:
        """Return a copy of the tokens delivered so far."""
        tokens: IntArray = self.tokens[slot, self.prompt_len[slot] : self.known[slot]].copy()
        return tokens

    def ready(self) -> npt.NDArray[np.intp]:
        """Return the running slots that have something to compute."""
        return np.flatnonzero(self.running & (self.length < self.limit))

    def _set_stops(self, slot: int, request: Request) -> None:
        params = request.spec.params
        ids = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *request.spec.eos_token_ids)
        if len(ids) > self.stops.shape[1]:
            wider = np.full((self.num_slots, len(ids)), NO_TOKEN, np.int32)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = NO_TOKEN
        self.stops[slot, : len(ids)] = ids
