"""Admissions: which waiting request enters a slot, and what the others wait for.

A request that cannot enter is parked under its reason and looked at again when that reason ends:

    stored KV         the answer of a lookup, or the completion of the save of its own KV
    its grammar       that it is compiled
    a prefix          a running request computes it; the wait is bounded
    blocks            the request is the first in line and does not fit; nobody overtakes it
    a slot            every request waits; nothing is looked at

So planning costs what a step computes, however many requests wait and however long their prompts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fd_core.config import Limits
from fd_core.kv.blocks import BlockPool
from fd_core.scheduling.operations.grammars import GrammarCompiling
from fd_core.scheduling.operations.kv_offloading import KVOffloading
from fd_core.scheduling.operations.kv_transferring import KVTransferring
from fd_core.scheduling.phases import PhaseClock
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.prefixes import Prefixes
from fd_core.scheduling.requests import Event, Request
from fd_core.scheduling.running.plan import PlanBuilder
from fd_core.scheduling.running.residencies import Residencies
from fd_core.scheduling.running.slots import SlotTable
from fd_core.scheduling.waiting.admission_control import AdmissionControl, AdmissionPass
from fd_core.scheduling.waiting.queue import WaitingQueue
from fd_core.types import IntArray, Phase

__all__ = ["Admissions"]

_MAX_PARKED: Final = 256
"""Waiting requests that one plan parks; later plans look at the others."""
_MAX_SHARED: Final = 1 << 14
"""Blocks of known prefixes that one plan gives to new requests: they cost the plan time, and the step no token."""
_PATIENCE: Final = 16
"""Steps that a request waits for a prefix beyond twice the steps that its prefill takes alone."""
_RETRY_STEPS: Final = 16
"""Steps after which the first in line is looked at again although no block came free."""


@dataclass
class Admissions:
    """The waiting requests of one scheduler, and their way into slots."""

    _limits: Limits
    _policy: SchedulingPolicy
    _pool: BlockPool
    _slots: SlotTable
    _waiting: WaitingQueue
    _prefixes: Prefixes
    _offloading: KVOffloading
    _transferring: KVTransferring
    _grammars: GrammarCompiling
    _control: AdmissionControl
    _residencies: Residencies
    _times: PhaseClock
    _impatient: set[int] = field(default_factory=set)
    """Requests, by arrival, that have waited long enough for a prefix and compute it themselves."""
    _blocked: tuple[int, int, int] | None = None
    """Arrival of the first in line that did not fit, blocks freed by then, and the step."""

    # Requests come and go ---------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A new request begins to wait."""
        self._policy.arrived(request.queued())
        self.wait(request)

    def wait(self, request: Request) -> None:
        """A request begins to wait, new or after a preemption."""
        self._prefixes.extend(request)
        operation = self._grammars.begin_wait(request)
        if not self._transferring.wants(request):
            asked = self._offloading.begin_wait(request, self._prefixes.keys(request))
            operation = operation if asked is None else asked
        self._waiting.push(request)
        if operation is not None:
            self._waiting.park(request, operation)

    def leave(self, request: Request) -> None:
        """A waiting request was aborted."""
        self._waiting.remove(request)
        self._offloading.leave(request)
        self._grammars.leave(request)
        self._impatient.discard(request.arrival)

    def ended(self, request: Request) -> None:
        """A request ended, wherever it was in its life."""
        self._policy.ended(request.queued(), request.num_tokens)
        self._waiting.turn_changed(request)

    # A plan -----------------------------------------------------------------------------------------------

    def admit(self, draft: PlanBuilder, step: int) -> None:
        """Move waiting requests into free slots while budget, slots and blocks allow."""
        if not len(self._waiting):
            return
        self._impatient.update(request.arrival for request in self._waiting.expire(step))
        admission_pass = AdmissionPass(self._control, self._slots)
        slot = self._slots.free_slot()
        matched = nothing = np.empty(0, np.int32)
        parked = shared = 0
        while draft.budget.left and slot is not None and parked < _MAX_PARKED and shared < _MAX_SHARED:
            request = self._waiting.first()
            if request is None:
                return
            if self._is_blocked(request, step):
                self._times.line_waits_for(Phase.BLOCKS)
                return
            if request.compiling is not None:
                self._waiting.park(request, request.compiling)
                parked += 1
                continue
            keys = self._prefixes.keys(request)
            if self._park_for_prefix(request, keys, step):
                parked += 1
                continue
            matched = self._prefixes.match(keys, matched)
            if len(matched) < len(keys) and self._park_for_lookup(request, keys):
                matched = nothing  # blocks without an owner may be gone when the next prompt is matched
                parked += 1
                continue
            blocks = self._blocks_for(request, matched, admission_pass)
            if blocks is None:
                self._blocked = (request.arrival, self._pool.num_freed, step)
                self._times.line_waits_for(Phase.BLOCKS)
                return
            self._enter(slot, request, matched, blocks, draft)
            shared += len(matched)
            slot = self._slots.free_slot()
        self._times.line_waits_for(Phase.SLOT if slot is None else Phase.BUDGET)

    def _is_blocked(self, request: Request, step: int) -> bool:
        """Whether the first in line did not fit and nothing has changed since."""
        if self._blocked is None:
            return False
        arrival, freed, since = self._blocked
        return request.arrival == arrival and freed == self._pool.num_freed and step - since < _RETRY_STEPS

    def _park_for_prefix(self, request: Request, keys: Sequence[bytes], step: int) -> bool:
        """Park a request if running requests are about to compute blocks of its prefix."""
        awaited = None if request.arrival in self._impatient else self._prefixes.awaited(keys)
        if awaited is None:
            return False
        key, blocks = awaited
        steps = -(-blocks * self._limits.block_size // self._limits.max_num_batched_tokens)
        self._waiting.park(request, key, step + _PATIENCE + 2 * steps)
        return True

    def _park_for_lookup(self, request: Request, keys: Sequence[bytes]) -> bool:
        """Park a request whose prefix the device has only in part, until it is known what is stored elsewhere."""
        if self._transferring.wants(request):
            return False
        # The device may have had all of it when the request began to wait, and lost it since.
        lookup = self._offloading.ask(request, keys)
        if lookup is None:
            return False
        self._waiting.park(request, lookup)
        return True

    def _blocks_for(self, request: Request, matched: IntArray, admission_pass: AdmissionPass) -> IntArray | None:
        """Take the blocks of a known prefix and those for the other tokens, or change nothing and return None."""
        needed = -(-request.num_tokens // self._limits.block_size) - len(matched)
        self._pool.acquire(matched)
        fits = admission_pass.fits(request, needed, self._pool.num_free)
        blocks = self._pool.allocate(needed) if fits else None
        if blocks is None:
            self._pool.release(matched, -1)
            return None
        admission_pass.admitted(request)
        return blocks

    def _enter(self, slot: int, request: Request, matched: IntArray, blocks: IntArray, draft: PlanBuilder) -> None:
        """A request enters a slot: it computes at once, or waits there for its KV from outside the device."""
        residencies, first = self._residencies, len(matched)
        self._waiting.remove(request)
        self._impatient.discard(request.arrival)
        self._blocked = None
        residencies.occupy(slot, request, matched, blocks)
        self._policy.admitted(request.queued())
        self._waiting.turn_changed(request)
        if self._transferring.wants(request) and self._transferring.worth_fetching(request, first):
            # Requests with the same prefix do not wait for a fetch: they may compute before it ends.
            residencies.load(slot, Phase.TRANSFER)
            upto = -(-(request.num_tokens - 1) // self._limits.block_size)
            self._transferring.fetch(request, slot, self._slots.blocks(slot, first, upto), first)
            return
        keys = self._prefixes.keys(request)
        self._prefixes.announce(request, first, len(keys))
        count = self._offloading.worth_loading(request, first, len(keys))
        if count:
            residencies.load(slot, Phase.STORE)
            loaded = self._slots.blocks(slot, first, first + count)
            self._offloading.load(request, slot, keys[first : first + count], loaded, first)
            return
        request.advance(Event.ADMIT)
        cached = first * self._limits.block_size
        residencies.run(slot, cached, cached)
        draft.admit(slot, self._slots)
        chunk = draft.budget.take(request.num_tokens - cached)
        draft.add_row(slot, chunk)
