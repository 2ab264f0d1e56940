"""Collects the parts of a step plan while the scheduler decides, and deals out the step token budget.

The charge is per request and exact: a prefill chunk, or one token plus the row's real drafts. Drafts are the first to
shrink; a decode is left out only in rotation, the longest waiting first in.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fd_core.scheduling.requests import Request
from fd_core.scheduling.running.slots import SlotTable
from fd_core.types import Admission, BlockGrant, IntArray, Revocation, StepPlan, frozen

_ONES = frozen(np.ones(4096, np.int32))
_ZEROS = frozen(np.zeros(4096, np.int32))


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
    """A plan in the making; `build` freezes it."""

    def __init__(self, epoch: int, step: int, budget: int) -> None:
        self.budget = Budget(budget)
        self.preempted = False
        """Whether this pass preempted a request for want of blocks."""
        self.num_rows = 0
        self.rows = np.empty(0, np.intp)
        """Slots of the plan that was built, as an index: arrays of another integer type take several times as long."""
        self._epoch = epoch
        self._step = step
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

    def add_decodes(self, slots: npt.NDArray[np.intp]) -> None:
        """Schedule one token of each of several slots, without drafts."""
        count, many = len(slots), len(slots) > len(_ONES)
        self.num_rows += count
        self._slots.append(slots)
        self._num_tokens.append(np.ones(count, np.int32) if many else _ONES[:count])
        self._num_drafts.append(np.zeros(count, np.int32) if many else _ZEROS[:count])

    def add_row(self, slot: int, num_tokens: int) -> None:
        """Schedule one slot without drafts."""
        self.num_rows += 1
        self._slots.append(np.array([slot]))
        self._num_tokens.append(np.array([num_tokens], np.int32))
        self._num_drafts.append(_ZEROS[:1])

    def admit(self, slot: int, request: Request, table: SlotTable) -> None:
        """Tell the runner about a new residency and the blocks that it begins with."""
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
        )
        self._admissions.append(admission)
        blocks = table.tables[slot, : table.num_blocks[slot]].copy()
        blocks.setflags(write=False)
        if len(blocks):
            self._grants.append(BlockGrant(slot, 0, blocks))

    def grant(self, slot: int, offset: int, blocks: IntArray) -> None:
        """Append blocks to a slot's table from entry `offset` on."""
        if len(blocks):
            self._grants.append(BlockGrant(slot, offset, blocks))

    def revoke(self, slot: int, gen: int) -> None:
        """Revoke a slot; blocks granted to it in the same pass are void."""
        self._grants = [grant for grant in self._grants if grant.slot != slot]
        self._revocations.append(Revocation(slot, gen))

    def build(self, table: SlotTable) -> StepPlan | None:
        """Freeze the plan, with positions from the slot table; None without rows, admissions and revocations."""
        if not (self._slots or self._revocations or self._admissions):
            return None
        slots, num_tokens, num_drafts = np.empty(0, np.intp), _ZEROS[:0], _ZEROS[:0]
        if len(self._slots) == 1:  # most plans have one part only, which is nobody else's
            slots, num_tokens, num_drafts = self._slots[0], self._num_tokens[0], self._num_drafts[0]
        elif self._slots:
            slots, num_tokens = np.concatenate(self._slots), np.concatenate(self._num_tokens)
            num_drafts = np.concatenate(self._num_drafts)
        self.rows = slots
        starts, gens, places = table.num_computed[slots], table.gen[slots], slots.astype(np.int32)
        samples = starts + num_tokens - num_drafts >= table.num_planned[slots]
        for column in (places, gens, starts, num_tokens, num_drafts, samples):
            column.setflags(write=False)
        return StepPlan(
            epoch=self._epoch,
            step=self._step,
            slots=places,
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

    `drafts` int32[n] is what each row would like, `last_step` int64[n] when it last ran. If not every row fits, those
    that waited longest run, without drafts; among equals the turn goes round, so that all run equally often. Otherwise
    every row runs and what is left goes to drafts, dealt evenly: a row keeps its drafts or gets the common cap,
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
