"""Plans one step: preempted and aborted slots, the tokens of each row, and admissions, under the token budget.

Budget order is an invariant: decodes first, drafts shrink first, then unfinished prefills from the
oldest to the youngest, then admissions. Arrivals, aborts and block growth never depend on remaining budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fd_core.config import Limits
from fd_core.kv.blocks import BlockPool
from fd_core.scheduling.images import ImageBudget
from fd_core.scheduling.phases import PhaseClock
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.requests import Request, State
from fd_core.scheduling.running.drafts import DraftControl
from fd_core.scheduling.running.plan import Decodes, PlanBuilder, allot_decodes
from fd_core.scheduling.running.running_batch import RunningBatch, slot_of
from fd_core.scheduling.running.slots import SlotTable
from fd_core.scheduling.victims import VictimPolicy
from fd_core.types import IntArray, Phase, StepPlan


@dataclass
class Planner:
    """Plans the steps of one scheduler."""

    _limits: Limits
    _epoch: int
    _policy: SchedulingPolicy
    _victims: VictimPolicy
    _pool: BlockPool
    _slots: SlotTable
    _drafts: DraftControl
    _running_batch: RunningBatch
    _times: PhaseClock
    _admit: Callable[[PlanBuilder, int], None]
    """Moves waiting requests into free slots; receives the plan and the number of the step."""
    _displaced: Callable[[int], int | None]
    """Returns the slot that is preempted for a waiting request; receives the number of the step."""
    _step: int
    paused: bool = False
    """True if plans preempt every running slot and admit none."""
    _left_out: list[int] = field(default_factory=list)
    """Running slots that the last plan skipped."""
    _decodes: Decodes | None = None
    """Every running slot, if all of them decoded in the last plan; the next one computes the same rows."""
    _plans_with_room: int = 0
    """Further plans of `_decodes` in which no row needs a block."""

    def plan(self, aborting: list[Request]) -> StepPlan | None:
        """Decide the next step, or return None if a step could do nothing now; `aborting` requests are aborted."""
        limits = self._limits
        images = ImageBudget(limits.max_image_tokens, whole=limits.whole_images)
        builder = PlanBuilder(self._epoch, self._step, limits.max_num_batched_tokens, images)
        for slot in self._running_batch.kv_loaded:
            if self._slots.running[slot]:
                builder.admit(slot, self._slots.request_in(slot), self._slots)
        self._running_batch.kv_loaded.clear()
        for request in aborting:
            if request.state is State.RUNNING:
                self._running_batch.revoke(slot_of(request), request, builder)
        if self.paused:
            for slot in np.flatnonzero(self._slots.running).tolist():
                self._running_batch.preempt(slot, builder)
        elif (displaced := self._displaced(self._step)) is not None:
            self._running_batch.preempt(displaced, builder)
        decodes = self._decodes
        if decodes is not None and (decodes.membership != self._slots.membership or not decodes.plans_left):
            decodes = None
        rows = ready = self._slots.ready() if decodes is None else decodes.rows
        if len(ready):
            stages = self._limits.num_stages
            if decodes is None or not self._plans_with_room:
                rows = self._grow(ready if stages == 1 else self._of_this_plan(ready), builder)
            else:
                self._plans_with_room -= 1
            if decodes is not None and rows is ready:
                builder.add_decodes(decodes)
            else:
                self._decode(rows, builder)
                if builder.num_rows < len(rows):
                    self._continue_prefills(rows, builder)
                decodes = builder.decodes
                every = decodes is not None and len(decodes.rows) == len(ready) and stages == 1
                self._decodes = decodes if every else None
        left_out = builder.num_rows < len(ready)
        self._times.queue_phase_set = False
        if builder.preempted and not self.paused:
            self._times.set_queue_phase(Phase.BLOCKS)
        elif not self.paused:
            self._admit(builder, self._step)
        if not self._times.queue_phase_set:
            self._times.set_queue_phase(Phase.SCHEDULER)
        plan = builder.build(self._slots)
        if left_out or self._left_out:
            self._note_left_out(ready, rows, set() if plan is None else set(plan.slots.tolist()))
        if plan is not None:
            self._slots.schedule(builder.rows, plan)
            if self._drafts.possible and self._limits.pipeline_depth > 1:
                # Until the output arrives, assume the maximum of drafts that the runner may hold.
                sampling = builder.rows[plan.samples]
                self._slots.hold_drafts(sampling, self._drafts.most(sampling))
            self._step += 1
            counters = self._running_batch.counters
            counters.steps += 1
            counters.budget_used += builder.budget.limit - builder.budget.left
            counters.budget_limit += builder.budget.limit
        return plan

    def _of_this_plan(self, ready: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return the ready slots of this plan where pipeline stages compute different plans at the same time.

        The first stage needs the token that the last one samples, so a slot whose token is in flight waits. The other
        slots are divided among the plans that can still be started, longest wait first; no plan exceeds its equal part.
        """
        slots, depth = self._slots, self._limits.pipeline_depth
        is_known = slots.num_planned[ready] <= slots.num_tokens[ready]
        known = ready[is_known]
        in_flight = len(set(slots.last_step[ready[~is_known]].tolist()))
        share = min(-(-len(ready) // depth), -(-len(known) // max(1, depth - in_flight)))
        return np.sort(known[np.argsort(slots.last_step[known], kind="stable")[:share]])

    def _grow(self, ready: npt.NDArray[np.intp], builder: PlanBuilder) -> npt.NDArray[np.intp]:
        """Allocate the block that each ready slot's next token needs; return the slots that may run.

        The oldest requests are served first. If blocks run out, the plan waits for blocks that are freed soon before it
        chooses a victim, so one shortage never preempts a chain of requests.
        """
        slots = self._slots
        room = slots.room(ready)
        full = ready[room <= 0]
        if not len(full):
            self._plans_with_room = int(room.min(initial=self._limits.block_size)) - 1
            return ready
        self._plans_with_room = 0
        full = full[np.argsort(slots.arrival[full], kind="stable")]
        missing = slots.missing(full)
        if (blocks := self._pool.allocate(int(missing.sum()))) is not None:
            builder.grant(slots.extend(full, blocks))
            return ready
        stalled: list[int] = []
        awaited, pool, slides = 0, self._pool, slots.groups.sliding > 0
        for index, (slot, count) in enumerate(zip(full.tolist(), missing.tolist(), strict=True)):
            if not slots.running[slot]:
                continue
            blocks = pool.allocate(count)
            while blocks is None and awaited + count > (
                pool.num_free + pool.num_fenced + (slots.num_leaving() if slides else 0)
            ):
                self._running_batch.preempt(self._choose_victim(), builder)
                if not slots.running[slot]:
                    break
                blocks = pool.allocate(count)
            if blocks is not None:
                builder.grant(slots.extend(full[index : index + 1], blocks))
            elif slots.running[slot]:
                stalled.append(slot)
                awaited += count
        if not stalled and not builder.preempted:
            return ready
        return ready[slots.running[ready] & ~np.isin(ready, stalled)]

    def _choose_victim(self) -> int:
        running = self._slots.running_requests()
        preemption_candidates = running.only(self._policy.preemption_candidates(running))
        return int(preemption_candidates.slots[self._victims.choose(preemption_candidates)])

    def _decode(self, rows: npt.NDArray[np.intp], builder: PlanBuilder) -> None:
        """Charge one token for each decode, all of them first.

        If decodes alone would use up the budget, unfinished prefills join the rotation with one token each, so
        that they advance too.
        """
        slots = self._slots
        decoding = rows[slots.num_planned[rows] - slots.num_computed[rows] == 1]
        if len(decoding) >= builder.budget.left:
            decoding = rows
        if not len(decoding):
            return
        if len(decoding) < builder.budget.left and not self._drafts.possible:  # the common case
            count, plans_left = len(decoding), slots.limit[decoding] - slots.num_planned[decoding]
            builder.add_decodes(
                Decodes(
                    rows=decoding,
                    slots=decoding.astype(np.int32),
                    gens=slots.gen[decoding],
                    num_tokens=np.ones(count, np.int32),
                    num_drafts=np.zeros(count, np.int32),
                    samples=np.ones(count, np.bool_),
                    membership=slots.membership,
                    plans_left=int(plans_left.min()),
                )
            )
            return
        wanted = self._wanted_drafts(decoding, builder)
        chosen, granted = allot_decodes(builder.budget, wanted, slots.last_step[decoding])
        builder.add_rows(decoding[chosen], granted + 1, granted)

    def _wanted_drafts(self, rows: npt.NDArray[np.intp], builder: PlanBuilder) -> IntArray:
        """Return int32[n]: drafts that each row would verify if the budget allows, with room for their KV."""
        if not self._drafts.possible:
            return np.zeros(len(rows), np.int32)
        slots = self._slots
        is_decode = slots.num_planned[rows] - slots.num_computed[rows] == 1
        ready = np.where(is_decode, slots.drafts_ready[rows], 0)
        wanted = self._drafts.allowed(rows, np.minimum(ready, slots.limit[rows] - slots.num_planned[rows] - 1))
        room = slots.room(rows) - 1
        for index in np.flatnonzero(wanted > room).tolist():
            # A draft takes a block only if no other request will miss the block.
            row = rows[index : index + 1]
            count = slots.groups.count
            blocks = self._pool.allocate(count) if self._pool.num_free > count * len(rows) else None
            if blocks is not None:
                builder.grant(slots.extend(row, blocks))
                room[index] += self._limits.block_size
        fitting: IntArray = np.minimum(wanted, room).astype(np.int32)
        return fitting

    def _continue_prefills(self, rows: npt.NDArray[np.intp], builder: PlanBuilder) -> None:
        slots = self._slots
        prefilling = rows[slots.num_planned[rows] - slots.num_computed[rows] > 1]
        if not (builder.budget.left and len(prefilling)):
            return
        for slot in prefilling[np.argsort(slots.arrival[prefilling], kind="stable")].tolist():
            wanted = int(slots.num_planned[slot] - slots.num_computed[slot])
            if slots.groups.sliding:
                wanted = self._room_for_chunk(slot, min(wanted, builder.budget.left), builder)
            if images := slots.request_in(slot).images:
                start = int(slots.num_computed[slot])
                wanted = builder.images.cut(images, start, min(wanted, builder.budget.left))
            chunk = builder.budget.take(wanted)
            if chunk:
                builder.add_row(slot, chunk)

    def _room_for_chunk(self, slot: int, wanted: int, builder: PlanBuilder) -> int:
        """Allocate the blocks of sliding groups for a chunk of `wanted` tokens; return how many tokens have room."""
        slots, row = self._slots, np.array([slot])
        while (room := int(slots.room(row)[0])) < wanted:
            blocks = self._pool.allocate(slots.groups.sliding)
            if blocks is None:
                break
            builder.grant(slots.extend(row, blocks))
        return min(room, wanted)

    def _note_left_out(self, ready: npt.NDArray[np.intp], rows: npt.NDArray[np.intp], chosen: set[int]) -> None:
        """Record the wait reason of running requests that this plan leaves out: `rows` of the `ready` slots had blocks.

        Where stages compute different plans, a slot that is not in this one is in another.
        """
        if self._limits.num_stages > 1:
            return
        slots, times, may_run = self._slots, self._times, set(rows.tolist())
        for slot in self._left_out:
            request = slots.requests[slot]
            if request is not None and slot in chosen:
                times.enter(request.times, Phase.COMPUTING)
        self._left_out = [slot for slot in ready.tolist() if slots.running[slot] and slot not in chosen]
        for slot in self._left_out:
            times.enter(slots.request_in(slot).times, Phase.BUDGET if slot in may_run else Phase.BLOCKS)
