"""The simulated device: completes the plans of a production engine at modelled times, with synthetic tokens."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from fd_core.config import Limits
from fd_core.engine.device import Device
from fd_core.ops.contract import KVCache
from fd_core.runner.runner import Runner
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID
from fd_core.simulation.clock.timeline import Timeline
from fd_core.simulation.costs.profile import Costs
from fd_core.simulation.storage.storage import BlankKVCache
from fd_core.simulation.workloads.conversations import Piece, stirred, to_tokens, tokens_from
from fd_core.types import Admission, Image, StepOutput, StepPlan

END: Final = 2
_AHEAD: Final = 256
"""Tokens of an answer that are drawn at once, where there are no drafts."""

AnswerOf = Callable[[str], Piece | None]
"""Returns the answer to a request by its id; None for a request that only computes its prompt."""


class PlanComputer(Protocol):
    """Computes outputs from plans, in order: `ScriptedComputer`, or a production `Runner` with its own model."""

    cache: KVCache

    def announce(self, plan: StepPlan) -> None:
        """Receive a plan when it is submitted, while earlier ones may still be in flight."""
        return

    def execute(self, plan: StepPlan) -> StepOutput:
        """Return the output of a plan."""


class ScriptedComputer(PlanComputer):
    """Returns the tokens of each request's answer, at the position of the engine's own bookkeeping.

    A lost or repeated token shifts or ends the rest of the answer, so that its reader detects it.
    """

    def __init__(self, limits: Limits, answer_of: AnswerOf, acceptance: float = 0.0) -> None:
        """`acceptance`: probability that a draft is accepted, if those before it were."""
        slots = limits.max_num_seqs
        self.cache: KVCache = BlankKVCache(limits.num_kv_blocks, limits.block_size)
        self._limits = limits
        self._answer_of = answer_of
        self._acceptance = acceptance
        self._gens = np.zeros(slots, np.int32)
        self._length = np.zeros(slots, np.int32)
        self._prompt = np.zeros(slots, np.int32)
        """Number of tokens among them that belong to the client's prompt."""
        self._seeds = np.zeros(slots, np.uint64)
        self._answers = np.zeros(slots, np.int64)
        self._drafts = np.zeros(slots, np.int32)
        self._columns = np.arange(1 + limits.max_drafts)
        self._nothing = np.full((slots, len(self._columns)), EMPTY_TOKEN_ID, np.int32)
        self._drawn = np.full((slots, _AHEAD), END, np.int32)
        """The part of each answer that contains its next token; it begins at a multiple of its length."""
        self._coming = self._drawn.reshape(-1)
        self._next = np.arange(slots) * _AHEAD
        """Index into `coming` of each slot's next token."""
        self._ends = self._next + _AHEAD
        self._steps = 0
        """Steps for which the drawn tokens are enough, for any slots that they compute."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Return the output of a plan. Raises `RuntimeError` if it computes tokens that no slot has, or too many."""
        for admission in plan.admissions:
            self._admit(admission)
        tokens = self._nothing.copy()
        width = tokens.shape[1]
        slots = plan.slots.astype(np.intp)
        if len(slots):
            own, drafts = plan.num_tokens, plan.num_drafts
            if width > 1:
                own, drafts = own - drafts, np.minimum(drafts, self._drafts[slots])
            self._check(plan, slots, own, drafts=drafts)
            sampling = plan.samples
            if np.count_nonzero(sampling) < len(slots):
                slots, drafts = slots[sampling], drafts[sampling]
            if width == 1:
                tokens[slots, 0] = self._next_tokens(slots)
                self._length[slots] += 1
            else:
                positions = (self._length[slots] - self._prompt[slots])[:, None] + self._columns
                kept = self._kept(slots, positions, drafts)
                live = self._columns <= kept[:, None]
                each = np.broadcast_to(slots[:, None], positions.shape)
                drawn = to_tokens(stirred(self._seeds[each], positions), self._limits.vocab_size)
                drawn = np.where(positions < self._answers[each], drawn, np.int32(END))
                tokens[slots] = np.where(live, drawn, np.int32(EMPTY_TOKEN_ID))
                self._length[slots] += 1 + kept
                self._drafts[slots] = width - 1 if self._acceptance else 0
        for revocation in plan.revocations:
            tokens[revocation.slot, 0] = PREEMPTED_TOKEN_ID
        ready = self._drafts.copy() if width > 1 else None
        return StepOutput(plan.epoch, plan.step, tokens, gens=self._gens.copy(), drafts_ready=ready)

    def _admit(self, admission: Admission) -> None:
        slot = admission.slot
        answer = self._answer_of(admission.request_id) or Piece(0, 2**31 - 1)
        self._gens[slot] = admission.gen
        self._length[slot] = len(admission.token_ids)
        self._prompt[slot] = admission.prompt_len
        self._seeds[slot] = answer.seed & (2**64 - 1)
        self._answers[slot] = answer.tokens
        self._drafts[slot] = 0
        if len(self._columns) == 1:
            self._draw_ahead(slot)
            self._steps = min(self._steps, int(self._ends[slot] - self._next[slot]))

    def _next_tokens(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        """Return the next token of the answer in each of `slots`."""
        if not self._steps:
            for slot in (self._next == self._ends).nonzero()[0].tolist():
                self._draw_ahead(slot)
            self._steps = int((self._ends - self._next).min())
        self._steps -= 1
        positions = self._next[slots]
        self._next[slots] = positions + 1
        return self._coming[positions]

    def _draw_ahead(self, slot: int) -> None:
        """Draw the part of an answer that contains its next token."""
        index = int(self._length[slot]) - int(self._prompt[slot])
        first = index - index % _AHEAD
        self._next[slot] = slot * _AHEAD + index - first
        answer = Piece(int(self._seeds[slot]), int(self._answers[slot]))
        text = tokens_from(answer, first, max(0, min(_AHEAD, answer.tokens - first)), self._limits.vocab_size)
        self._drawn[slot, : len(text)] = text
        self._drawn[slot, len(text) :] = END

    def _kept(
        self, slots: npt.NDArray[np.intp], positions: npt.NDArray[np.intp], drafts: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Return int32[n], the number of accepted drafts: by a chance of each position, however often it is drafted."""
        luck = stirred(~self._seeds[slots][:, None], positions[:, :-1]) >> np.uint64(11)
        kept = (luck * 2.0**-53 < self._acceptance) & (self._columns[:-1] < drafts[:, None])
        counts: npt.NDArray[np.int32] = np.logical_and.accumulate(kept, axis=1).sum(axis=1, dtype=np.int32)
        return counts

    def _check(
        self, plan: StepPlan, slots: npt.NDArray[np.intp], own: npt.NDArray[np.int32], drafts: npt.NDArray[np.int32]
    ) -> None:
        total = sum(own.tolist()) + (sum(drafts.tolist()) if len(self._columns) > 1 else 0)
        budget = self._limits.max_num_batched_tokens
        if total > budget:
            raise RuntimeError(f"step {plan.step} computes {total} tokens, over the step token budget {budget}")
        last = self._length[slots] - own
        if np.count_nonzero(last - plan.starts):  # else every row computes the tokens of its slot, up to its last token
            early = np.where(plan.samples, last, plan.starts)
            late = np.where(plan.samples, plan.starts, last)
            if np.count_nonzero((early > late) | (early < 0)):
                raise RuntimeError(f"step {plan.step} computes tokens that its requests do not have")
        if self._gens[slots].tobytes() != plan.gens.tobytes():
            raise RuntimeError(f"step {plan.step} has a row of a request that is not in its slot")


class _SharedReads:
    """Counts positions that rows of a step read and that others of its rows read as well: those of shared blocks."""

    def __init__(self, limits: Limits) -> None:
        self._block_size, self._num_blocks = limits.block_size, limits.num_kv_blocks
        self._tables = np.zeros((limits.max_num_seqs, limits.blocks_per_seq + 1), np.int32)
        self._held = np.zeros(limits.max_num_seqs, np.int32)
        self._columns = np.arange(limits.blocks_per_seq + 1)

    def count(self, plan: StepPlan) -> int:
        """Record the plan's grants; return how many positions of its rows are not read for the first time."""
        for admission in plan.admissions:
            self._held[admission.slot] = 0
        for grant in plan.grants:
            end = grant.offset + len(grant.blocks)
            self._tables[grant.slot, grant.offset : end] = grant.blocks
            self._held[grant.slot] = end
        slots = plan.slots
        read = self._tables[slots][self._columns < self._held[slots, None]]
        first = np.zeros(self._num_blocks, np.bool_)
        first[read] = True
        return (len(read) - int(np.count_nonzero(first))) * self._block_size


class SimulatedDevice(Device):
    """Computes one plan after the other on the virtual clock; `hang` and `slowness` are for faults."""

    def __init__(self, timeline: Timeline, costs: Costs, computer: PlanComputer, limits: Limits) -> None:
        self.slowness = 1.0
        """Factor of the time of each step that is submitted from now on."""
        self.beside: Callable[[StepPlan], float] = lambda _: 1.0
        """Factor of the time of a plan, by the other steps on the machine when it is submitted."""
        self.busy_seconds = 0.0
        self._timeline = timeline
        self._costs = costs
        self._computer = computer
        self._shared = _SharedReads(limits) if costs.shared_read(1) else None
        self._images: dict[int, tuple[Image, ...]] = {}
        """Images of the prompts in slots."""
        self._plans: deque[tuple[StepPlan, float]] = deque()
        self._busy_until = 0.0
        self._free_at = 0.0
        """Time at which the processor has finished its work outside steps."""
        self._hangs = False

    @property
    def ready_at(self) -> float:
        """Completion time of the oldest plan; infinite if it never completes."""
        return math.inf if self._hangs else self._plans[0][1]

    def submit(self, plan: StepPlan) -> None:
        """Start to compute once the engine's loop is done with the plan and the device with those before it."""
        begins = max(max(self._timeline.now, self._free_at) + self._costs.turn(plan), self._busy_until)
        seconds = self._costs.step(plan)
        if tokens := self._image_tokens(plan):
            seconds += self._costs.images(tokens)
        if self._shared is not None:
            seconds -= self._costs.shared_read(self._shared.count(plan))
        seconds = max(0.0, seconds) * self.slowness * self.beside(plan)
        self.busy_seconds += seconds
        self._busy_until = begins + seconds
        self._computer.announce(plan)
        self._plans.append((plan, self._busy_until))

    def _image_tokens(self, plan: StepPlan) -> int:
        """Return the tokens of images that begin in a plan, as `ImageBudget` counts them."""
        for admission in plan.admissions:
            if admission.images or self._images:
                self._images[admission.slot] = admission.images
        if not self._images:
            return 0
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), plan.num_tokens.tolist(), strict=True)
        return sum(
            image.num_tokens
            for slot, start, count in rows
            for image in self._images.get(slot, ())
            if start <= image.start < start + count
        )

    @property
    def computing(self) -> bool:
        """True if a step is being computed."""
        return self._busy_until > self._timeline.now

    def run_on_step_cpu(self, seconds: float) -> float:
        """Run other work on the processor that computes steps; return how long that takes.

        Steps in flight share the processor with it and complete later by its time; so does the next one start.
        """
        if not self.computing:
            self._free_at = max(self._free_at, self._timeline.now) + seconds
            return seconds
        self._busy_until += seconds
        self._plans = deque((plan, ready + seconds) for plan, ready in self._plans)
        return 2 * seconds

    def collect(self, timeout: float) -> StepOutput:
        """Return the output of the oldest plan; the caller has waited until `ready_at`."""
        return self._computer.execute(self._plans.popleft()[0])

    def hang(self) -> None:
        """Complete no plan from now on."""
        self._hangs = True

    def perform(self, change: Callable[[Runner], None]) -> None:
        """A no-op: there is no runner with adapters."""
        raise NotImplementedError("a simulated device holds no adapters")

    def close(self) -> None:
        """Drop the plans that were not computed."""
        self._plans.clear()
