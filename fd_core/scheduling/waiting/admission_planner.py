"""Admission: which waiting request enters a slot, and the wait reasons of the others.

A request that cannot enter is parked under its reason and considered again when that reason ends:

    stored KV         the result of a lookup, or the completion of the save of its KV
    its grammar       the completion of its compilation
    a prefix          a running request computes it; the wait is bounded
    blocks            the head of the queue does not fit; no request overtakes it
    a slot            every request waits; none is considered

So the cost of planning depends on the work of the step, not on the number of waiting requests or their lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fd_core.config import Limits
from fd_core.config.layer_groups import ONE_GROUP
from fd_core.effects.operations import CompileGrammar
from fd_core.kv.blocks import BlockPool
from fd_core.scheduling.images import whole_blocks
from fd_core.scheduling.operations.kv_offloading import KVOffloading
from fd_core.scheduling.operations.kv_transferring import KVTransferring
from fd_core.scheduling.operations.registry import Operations
from fd_core.scheduling.phases import PhaseClock
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.prefixes import Prefixes
from fd_core.scheduling.requests import Event, Request
from fd_core.scheduling.running.plan import PlanBuilder
from fd_core.scheduling.running.running_batch import RunningBatch
from fd_core.scheduling.running.slots import SlotTable
from fd_core.scheduling.victims import VictimPolicy
from fd_core.scheduling.waiting.admission_control import AdmissionControl
from fd_core.scheduling.waiting.queue import WaitingQueue
from fd_core.types import Phase

_MAX_PARKED: Final = 256
"""Waiting requests that one plan parks; later plans consider the others."""
_MAX_SHARED: Final = 1 << 14
"""Blocks of known prefixes that one plan assigns to new requests: they cost the plan time, and the step no token."""
_MAX_PREFIX_WAIT_STEPS: Final = 16
"""Steps that a request waits for a prefix beyond twice the steps that its prefill takes alone."""
_PATIENCE_STEPS: Final = 16
"""Steps that the head of the queue waits for a slot or blocks before the policy is asked whom it displaces."""
_RETRY_STEPS: Final = 16
"""Steps after which the head of the queue is considered again although nothing was freed."""


@dataclass
class AdmissionPlanner:
    """The waiting requests of one scheduler, and their admission to slots."""

    _limits: Limits
    _policy: SchedulingPolicy
    _victims: VictimPolicy
    _pool: BlockPool
    _slots: SlotTable
    _waiting: WaitingQueue
    _prefixes: Prefixes
    _offloading: KVOffloading
    _transferring: KVTransferring
    _operations: Operations
    _control: AdmissionControl
    _running_batch: RunningBatch
    _times: PhaseClock
    _prefix_wait_expired: set[int] = field(default_factory=set)
    """Requests, by arrival, whose prefix wait expired and that compute the prefix themselves."""
    _blocked: tuple[int, int, int] | None = None
    """Arrival of the head of the queue that did not fit, blocks freed by then, and the step."""
    _short: tuple[int, int] | None = None
    """Arrival of the head of the queue that finds no slot or no blocks, and the step from which its wait is counted."""

    def enqueue(self, request: Request) -> None:
        """Enqueue a request, new or after a preemption."""
        self._prefixes.extend(request)
        grammar = request.spec.params.grammar
        operation = None
        if grammar is not None:
            compiling = CompileGrammar(self._operations.next, grammar)
            operation = request.compiling = self._operations.begin(compiling, request)
        if self._offloading.stores and not (self._transferring.paired and self._transferring.wants(request)):
            asked = self._offloading.begin_wait(request, self._prefixes.keys(request))
            operation = operation if asked is None else asked
        if operation is None:
            self._waiting.push(request)
        else:
            self._waiting.park(request, operation)

    def remove(self, request: Request) -> None:
        """Remove a waiting request that was aborted."""
        self._waiting.remove(request)
        self._offloading.cancel(request)
        self._operations.cancel(request.compiling)
        request.compiling = None
        self._prefix_wait_expired.discard(request.arrival)

    def displaced(self, step: int) -> int | None:
        """Return the slot to preempt for the head of the queue once it has waited `_PATIENCE_STEPS`; None for no slot.

        At most one slot per plan: a plan that preempts does not admit requests.
        """
        slots = self._slots
        if self._short is None or step - self._short[1] < _PATIENCE_STEPS or slots.num_draining:
            return None
        head = self._waiting.first()
        if head is None or head.arrival != self._short[0] or not slots.running.any():
            return None
        self._short, running = (head.arrival, step), slots.running_requests()
        row = self._policy.displaced_by(head.queued_view or head.queued(), running, self._victims)
        return None if row is None else int(running.slots[row])

    def admit(self, builder: PlanBuilder, step: int) -> None:
        """Move waiting requests into free slots while budget, slots and blocks allow."""
        if not len(self._waiting):
            return
        for late in self._waiting.expire(step):
            self._prefix_wait_expired.add(late.arrival)
        pool, prefixes, size = self._pool, self._prefixes, self._limits.block_size
        self._control.bound = None
        slot = self._slots.free_slot()
        groups = self._limits.groups
        matched = nothing = np.empty(0 if groups == ONE_GROUP else (groups.count, 0), np.int32)
        parked = shared = 0
        while builder.budget.left and slot is not None and parked < _MAX_PARKED and shared < _MAX_SHARED:
            request = self._waiting.first()
            if request is None:
                return
            if self._blocked is not None:
                arrival, freed, since = self._blocked
                if request.arrival == arrival and freed == pool.num_freed and step - since < _RETRY_STEPS:
                    self._times.set_queue_phase(Phase.BLOCKS)
                    return
            if request.compiling is not None:
                self._waiting.park(request, request.compiling)
                parked += 1
                continue
            keys = prefixes.keys(request)
            if prefixes.computing and self._park_for_prefix(request, keys, step):
                parked += 1
                continue
            matched = prefixes.match(keys, matched) if keys else nothing
            if request.images and (whole := whole_blocks(request.images, matched.shape[-1], size)) < matched.shape[-1]:
                matched = prefixes.match(keys[:whole], nothing)
            if matched.shape[-1] < len(keys) and self._offloading.stores and self._park_for_lookup(request, keys):
                matched = nothing  # blocks without an owner may be evicted before the next match
                parked += 1
                continue
            if self._limits.whole_prompts and request.num_tokens > builder.budget.left:
                break
            first, end = matched.shape[-1], -(-request.num_tokens // size)
            needed = groups.whole * (end - first)
            known = matched.T[matched.T >= 0]
            pool.acquire(known)
            if groups.sliding:
                # These groups get the blocks of each chunk when it is planned: most leave the window before the next.
                chunk = min(first + max((pool.num_free - needed) // groups.sliding, 1), end)
                end = min(chunk, -(-(first * size + builder.budget.left) // size))
                if (arriving := self._arriving(request, keys)) > first * size:
                    end = first + max(len(groups.read_after(first, arriving, size)), 1)
                needed += groups.sliding * (end - first)
            fits = self._control.admits(self._slots, request, needed, known=len(known), free=pool.num_free)
            blocks = pool.allocate(needed) if fits else None
            if blocks is None:
                pool.release(known, -1)
                self._blocked = (request.arrival, pool.num_freed, step)
                self._note_short(request, step)
                self._times.set_queue_phase(Phase.BLOCKS)
                return
            self._slots.occupy(slot, request, matched, blocks, sliding_end=end)
            self._enter(slot, request, keys, first=first, room=end * size, builder=builder)
            shared += len(known)
            slot = self._slots.free_slot()
        if slot is None:
            self._note_short(self._waiting.first(), step)
        self._times.set_queue_phase(Phase.SLOT if slot is None else Phase.BUDGET)

    def _note_short(self, head: Request | None, step: int) -> None:
        if head is None:
            self._short = None
        elif self._short is None or self._short[0] != head.arrival:
            self._short = head.arrival, step

    def _arriving(self, request: Request, keys: Sequence[bytes]) -> int:
        """Return how many leading tokens of a request may get their KV from outside the device."""
        if self._transferring.paired and self._transferring.wants(request):
            return request.num_tokens - 1
        return min(request.stored, len(keys)) * self._limits.block_size

    def _park_for_prefix(self, request: Request, keys: Sequence[bytes], step: int) -> bool:
        """Park a request if running requests are about to compute blocks of its prefix."""
        awaited = None if request.arrival in self._prefix_wait_expired else self._prefixes.awaited(keys)
        if awaited is None:
            return False
        key, blocks = awaited
        steps = -(-blocks * self._limits.block_size // self._limits.max_num_batched_tokens)
        self._waiting.park(request, key, step + _MAX_PREFIX_WAIT_STEPS + 2 * steps)
        return True

    def _park_for_lookup(self, request: Request, keys: Sequence[bytes]) -> bool:
        """Park a request whose prefix the device has only in part, until a lookup of the other tiers completes."""
        if self._transferring.wants(request):
            return False
        # The device may have had the whole prefix when the request began to wait, and evicted it since.
        lookup = self._offloading.start_lookup(request, keys)
        if lookup is None:
            return False
        self._waiting.park(request, lookup)
        return True

    def _enter(
        self,
        slot: int,
        request: Request,
        keys: Sequence[bytes],
        first: int,
        room: int,
        builder: PlanBuilder,
    ) -> None:
        """Begin a request in its slot after the `first` blocks of its prompt, which are cached.

        It has blocks for `room` tokens. It computes at once, or waits there for its KV from outside the device.
        """
        running_batch, queued = self._running_batch, request.queued_view or request.queued()
        self._waiting.remove(request)
        self._prefix_wait_expired.discard(request.arrival)
        self._blocked = None
        self._policy.admitted(queued)
        if self._waiting.turns_move:
            self._waiting.turn_changed(request)
        transferring = self._transferring
        if transferring.paired and transferring.wants(request) and transferring.worth_fetching(request, first):
            # Requests with the same prefix do not wait for a fetch: they may compute before it ends.
            running_batch.load(slot, Phase.TRANSFER)
            transferring.fetch(request, slot, self._slots.tables[:, slot], first)
            return
        self._prefixes.announce(request, first, len(keys))
        count = self._offloading.worth_loading(request, first, len(keys)) if request.stored else 0
        if request.images:
            count = max(whole_blocks(request.images, first + count, self._limits.block_size) - first, 0)
        if count:
            running_batch.load(slot, Phase.STORE)
            self._offloading.load(request, slot, self._slots.tables[:, slot], range(first, first + count))
            return
        request.advance(Event.ADMIT)
        cached = first * self._limits.block_size
        running_batch.run(slot, request, cached, cached)
        builder.admit(slot, request, self._slots)
        chunk = min(request.num_tokens, room) - cached
        if request.images:
            chunk = builder.images.cut(request.images, cached, min(chunk, builder.budget.left))
        if chunk:
            builder.add_row(slot, builder.budget.take(chunk))
