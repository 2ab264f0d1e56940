"""Collects the parts of a step plan while the scheduler decides, and distributes the step token budget.

The charge is per request and exact: a prefill chunk, or one token plus the row's actual drafts. Drafts shrink first;
decodes are skipped only in rotation, and those that waited longest run first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fd_core.scheduling.images import ImageBudget
from fd_core.scheduling.requests import Request
from fd_core.scheduling.running.slots import SlotTable
from fd_core.types import Admission, BlockGrant, IntArray, Revocation, StepPlan, frozen

_NO_DRAFTS = frozen(np.zeros(1, np.int32))
_NO_ROWS = np.empty(0, np.intp)


@dataclass(slots=True)
class Decodes:
    """Rows that compute one token each, without drafts: the columns that plans share while the same slots decode."""

    rows: npt.NDArray[np.intp]
    slots: IntArray
    gens: IntArray
    num_tokens: IntArray
    num_drafts: IntArray
    samples: npt.NDArray[np.bool_]
    membership: int
    """`SlotTable.membership` for which the columns are valid."""
    plans_left: int
    """Plans until every token of one of the slots is planned."""


class Budget:
    """Tokens left in one step."""

    __slots__ = ("left", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit

    def take(self, wanted: int) -> int:
        """Charge up to `wanted` tokens and return how many were granted."""
        granted = min(wanted, self.left)
        self.left -= granted
        return granted


class PlanBuilder:
    """Mutable builder of a step plan; `build` freezes it."""

    def __init__(self, epoch: int, step: int, budget: int, images: ImageBudget | None = None) -> None:
        self.budget = Budget(budget)
        self.images = images or ImageBudget(0)
        self.preempted = False
        """True if this pass preempted a request because blocks ran out."""
        self.num_rows = 0
        self.rows = _NO_ROWS
        """Slots of the built plan as intp: indexing with another integer type is several times slower."""
        self._epoch = epoch
        self._step = step
        self.decodes: Decodes | None = None
        """The rows that decode without drafts, which come first."""
        self._slots: list[npt.NDArray[np.intp]] = []
        self._num_tokens: list[IntArray] = []
        self._num_drafts: list[IntArray] = []
        self._admissions: list[Admission] = []
        self._grants: list[BlockGrant] = []
        self._revocations: list[Revocation] = []

    def add_rows(self, slots: npt.NDArray[np.intp], num_tokens: IntArray, num_drafts: IntArray) -> None:
        """Schedule several slots."""
        if len(slots):
            self.num_rows += len(slots)
            self._slots.append(slots)
            self._num_tokens.append(num_tokens)
            self._num_drafts.append(num_drafts)

    def add_decodes(self, decodes: Decodes) -> None:
        """Schedule one token of each of several slots, without drafts."""
        self.decodes = decodes
        decodes.plans_left -= 1
        self.budget.left -= len(decodes.rows)
        self.add_rows(decodes.rows, decodes.num_tokens, decodes.num_drafts)

    def add_row(self, slot: int, num_tokens: int) -> None:
        """Schedule one slot without drafts."""
        self.num_rows += 1
        self._slots.append(np.array([slot]))
        self._num_tokens.append(np.array([num_tokens], np.int32))
        self._num_drafts.append(_NO_DRAFTS)

    def admit(self, slot: int, request: Request, table: SlotTable) -> None:
        """Notify the runner of an admitted request and its initial blocks."""
        admission = Admission(
            slot=slot,
            gen=int(table.gen[slot]),
            token_ids=request.tokens.view(),
            prompt_len=request.prompt_len,
            params=request.spec.params,
            eos_token_ids=request.spec.eos_token_ids,
            computed=int(table.num_computed[slot]),
            request_id=request.spec.request_id,
            pooling=request.spec.pooling,
            adapter=request.spec.adapter,
            images=request.images,
        )
        self._admissions.append(admission)
        for group in range(table.groups.count):
            begin, end = 0, table.num_blocks[slot]
            if group >= table.groups.whole:
                begin, end = table.sliding_begin[slot], table.sliding_end[slot]
            if begin < end:
                blocks = frozen(table.tables[group, slot, begin:end].copy())
                self._grants.append(BlockGrant(slot, int(begin), blocks, group))

    def grant(self, grants: list[BlockGrant]) -> None:
        """Notify the runner of more blocks."""
        self._grants += grants

    def revoke(self, slot: int, gen: int) -> None:
        """Preempt or abort a slot; blocks granted to it in the same pass are void."""
        self._grants = [grant for grant in self._grants if grant.slot != slot]
        self._revocations.append(Revocation(slot, gen))

    def build(self, table: SlotTable) -> StepPlan | None:
        """Freeze the plan, with positions from the slot table; None if it is empty."""
        if not (self._slots or self._revocations or self._admissions):
            return None
        decodes = self.decodes
        if decodes is not None and len(self._slots) == 1:  # the common case
            rows, num_tokens, num_drafts = decodes.rows, decodes.num_tokens, decodes.num_drafts
            slots, gens, samples = decodes.slots, decodes.gens, decodes.samples
            starts = table.num_computed[rows]
        else:
            rows, num_tokens, num_drafts = _NO_ROWS, _NO_DRAFTS[:0], _NO_DRAFTS[:0]
            if self._slots:
                rows, num_tokens = np.concatenate(self._slots), np.concatenate(self._num_tokens)
                num_drafts = np.concatenate(self._num_drafts)
            slots, gens, starts = rows.astype(np.int32), table.gen[rows], table.num_computed[rows]
            samples = starts + num_tokens - num_drafts >= table.num_planned[rows]
        self.rows = rows
        for column in (slots, gens, starts, num_tokens, num_drafts, samples):
            column.setflags(write=False)
        return StepPlan(
            epoch=self._epoch,
            step=self._step,
            slots=slots,
            gens=gens,
            starts=starts,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            samples=samples,
            admissions=tuple(self._admissions),
            grants=tuple(self._grants),
            revocations=tuple(self._revocations),
        )


def allot_decodes(
    budget: Budget, drafts: IntArray, last_step: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.intp], IntArray]:
    """Charge decoding rows and return (indices of the rows that run, drafts granted to each of them).

    `drafts` int32[n] is what each row requests, `last_step` int64[n] when it last ran. If not every row fits, those
    that waited longest run, without drafts; ties rotate, so that all run equally often. Otherwise
    every row runs and the remaining budget goes to drafts, dealt evenly: a row gets its drafts or the common cap,
    whichever is smaller, and the remainder goes to the earlier rows.
    """
    count = len(drafts)
    if count >= budget.left:
        first = (int(last_step.max(initial=-1)) + 1) * budget.left
        order = np.lexsort(((np.arange(count) - first) % max(count, 1), last_step))[: budget.left]
        chosen = np.sort(order)
        budget.take(len(chosen))
        return chosen, np.zeros(len(chosen), np.int32)
    budget.take(count)
    rows = np.arange(count)
    if not np.count_nonzero(drafts):
        return rows, drafts
    granted = deal(drafts, budget.left)
    budget.take(int(granted.sum()))
    return rows, granted


def deal(wanted: IntArray, tokens: int) -> IntArray:
    """Return the fairest int32[n], nowhere above `wanted`, whose sum is at most `tokens`."""
    if int(wanted.sum()) <= tokens:
        return wanted
    cap = int(wanted.max())
    while int(np.minimum(wanted, cap).sum()) > tokens:
        cap -= 1
    granted = np.minimum(wanted, cap)
    spare = tokens - int(granted.sum())
    more = np.flatnonzero(wanted > cap)[:spare]
    granted[more] += 1
    return granted.astype(np.int32)
