"""A computer for tests that checks, before every row, that the KV of its request is what its blocks hold."""

from __future__ import annotations

import numpy as np

from fd_core.backends.null import NullCache, next_hashes, running_hashes
from fd_core.config import Limits
from fd_core.ops.contract import KVShape
from fd_core.signals import EMPTY_TOKEN_ID
from fd_core.simulation.engines.device import AnswerOf, PlanComputer, ScriptedComputer
from fd_core.types import IntArray, StepOutput, StepPlan


def kv_checked(acceptance: float, limits: Limits, answer_of: AnswerOf) -> PlanComputer:
    """Return the scripted computer of a pool, with its KV checked."""
    return KVCheckedComputer(limits, ScriptedComputer(limits, answer_of, acceptance))


class WrongKV(RuntimeError):
    """A step would compute with KV that does not belong to its request: lost, stale or another request's."""


class KVCheckedComputer(PlanComputer):
    """Returns another computer's outputs; blocks hold the contents of the null backend: a hash of all tokens so far.

    Before a row is computed, the blocks of its slot must hold the hashes of its request, from any source.
    """

    def __init__(self, limits: Limits, computer: PlanComputer) -> None:
        slots, self._size = limits.max_num_seqs, limits.block_size
        shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, block_size=self._size)
        self.cache = NullCache(shape, limits.num_kv_blocks)
        self._computer = computer
        blocks = limits.blocks_per_seq + 1
        self._tables = np.zeros((slots, blocks), np.int32)
        self._blocks = np.arange(blocks)
        self._hashes = np.zeros((slots, blocks * self._size), np.uint64)
        """Hash at each position of the text in each slot."""
        self._length = np.zeros(slots, np.int32)
        self._names = [""] * slots

    def execute(self, plan: StepPlan) -> StepOutput:
        """Return the output of a plan. Raises `WrongKV`."""
        for admission in plan.admissions:
            slot, count = admission.slot, len(admission.token_ids)
            self._names[slot], self._length[slot] = admission.request_id, count
            self._hashes[slot, :count] = running_hashes(np.uint64(0), admission.token_ids)
        for grant in plan.grants:
            self._tables[grant.slot, grant.offset : grant.offset + len(grant.blocks)] = grant.blocks
        output = self._computer.execute(plan)
        slots, own = plan.slots, plan.num_tokens - plan.num_drafts
        before = self._length[slots]
        begins = np.where(plan.samples, before - own, plan.starts)
        self._require(plan, begins)
        for column in output.tokens[slots].T:
            emitted = column != EMPTY_TOKEN_ID
            positions = slots[emitted], self._length[slots[emitted]]
            self._hashes[positions] = next_hashes(self._hashes[positions[0], positions[1] - 1], column[emitted])
            self._length[positions[0]] += 1
        # The last emitted token has no KV yet; rejected drafts leave nothing that is read later.
        ends = begins + own + np.maximum(0, self._length[slots] - before - 1)
        single = ends - begins == 1
        self._write(slots[single], begins[single])
        for row in np.flatnonzero(~single):
            self._write(slots[row], np.arange(begins[row], ends[row]))
        return output

    def _require(self, plan: StepPlan, counts: IntArray) -> None:
        """Check the last of the first `counts` positions, and the last position of each block before it."""
        slots, size = plan.slots, self._size
        last = np.maximum(counts - 1, 0)
        wrong = self.cache.hashes[self._tables[slots], size - 1] != self._hashes[slots, size - 1 :: size]
        wrong &= self._blocks < (last // size)[:, None]
        held = self.cache.hashes[self._tables[slots, last // size], last % size]
        wrong[np.arange(len(slots)), last // size] = (held != self._hashes[slots, last]) & (counts > 0)
        if wrong.any():
            row, entry = np.argwhere(wrong)[0]
            slot = slots[row]
            raise WrongKV(
                f"step {plan.step} computes position {counts[row]} of {self._names[slot]} in slot {slot}, but block "
                f"{self._tables[slot, entry]}, entry {entry} of its table, does not hold the KV of its text"
            )

    def _write(self, slots: IntArray, positions: IntArray) -> None:
        held = self._tables[slots, positions // self._size], positions % self._size
        self.cache.hashes[held] = self._hashes[slots, positions]
