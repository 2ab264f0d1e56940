"""Persistent batch: the runner's state of each slot from step to step."""

from __future__ import annotations

import numpy as np

from fd_core.config import Limits
from fd_core.types import Admission, IntArray, StepPlan


class PersistentBatch:
    """Arrays over slots; only plans and sampled tokens change them."""

    def __init__(self, limits: Limits) -> None:
        slots = limits.max_num_seqs
        self._max_drafts = limits.max_drafts
        self.gen = np.zeros(slots, np.int32)
        self.length = np.zeros(slots, np.int32)
        """Tokens of the text: admitted and sampled since."""
        self.num_drafts = np.zeros(slots, np.int32)
        """Draft tokens, stored in `tokens` right after the known tokens."""
        self.tokens = np.zeros((slots, limits.max_model_len), np.int32)
        self.unsettled = np.zeros(slots, np.int32)
        """Trailing tokens of each text that are only on the device: one per step in flight that samples."""
        self.adapter_slots = np.zeros(slots, np.int32)
        """Adapter slot of each request, 0 for none."""
        self.tables = np.zeros((limits.groups.count, slots, limits.blocks_per_seq), np.int32)
        """Block tables of each group of layers."""

    def admit(self, admission: Admission, adapter_slot: int = 0) -> None:
        """Place a request in its slot."""
        slot, n = admission.slot, len(admission.token_ids)
        self.gen[slot] = admission.gen
        self.length[slot] = n
        self.num_drafts[slot] = 0
        self.adapter_slots[slot] = adapter_slot
        self.unsettled[slot] = 0
        self.tokens[slot, :n] = admission.token_ids

    def grant(self, plan: StepPlan) -> None:
        """Extend block tables."""
        for grant in plan.grants:
            self.tables[grant.group, grant.slot, grant.offset : grant.offset + len(grant.blocks)] = grant.blocks

    def advance(self, slots: IntArray) -> IntArray:
        """Count one token of a launched step for each of `slots` int32[N]; return the token positions, int32[N]."""
        begins: IntArray = self.length[slots]
        self.length[slots] = np.minimum(begins + 1, self.tokens.shape[1])
        self.num_drafts[slots] = 0
        self.unsettled[slots] += 1
        return begins

    def settle(self, slots: IntArray, begins: IntArray, sampled: IntArray, accepted: IntArray) -> None:
        """Settle the oldest step: store the first 1 + accepted[i] of sampled int32[N, 1 + k] from begins[i] on."""
        limit = self.tokens.shape[1]
        self.unsettled[slots] -= 1
        for column in range(int(accepted.max(initial=-1)) + 1):
            positions = begins + column
            live = (column <= accepted) & (positions < limit)
            self.tokens[slots[live], positions[live]] = sampled[live, column]
            if column:
                self.length[slots[live]] = positions[live] + 1

    def drafts(self, slots: IntArray) -> IntArray:
        """Return int32[n, k], the drafts of `slots`; entries after those of each slot are undefined."""
        positions = np.minimum(self.length[slots][:, None] + np.arange(self._max_drafts), self.tokens.shape[1] - 1)
        drafts: IntArray = self.tokens[slots[:, None], positions]
        return drafts

    def guess(self, slots: IntArray, drafts: IntArray, counts: IntArray) -> None:
        """Store drafts after the known tokens: the first counts[i] of drafts[i] in slots[i], as far as they fit."""
        begin = self.length[slots]
        counts = np.minimum(counts, self.tokens.shape[1] - begin)
        for column in range(drafts.shape[1]):
            some = column < counts
            self.tokens[slots[some], begin[some] + column] = drafts[some, column]
        self.num_drafts[slots] = counts

    def latest(self, slots: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
        """Return the last step's changes of `slots` as arguments of `correct`: slots, gens, lengths, drafts, tokens."""
        lengths, drafts = self.length[slots], self.num_drafts[slots]
        positions = np.minimum(self._around(lengths), self.tokens.shape[1] - 1)
        return slots, self.gen[slots], lengths, drafts, self.tokens[slots[:, None], positions]

    def correct(
        self, slots: IntArray, gens: IntArray, lengths: IntArray, num_drafts: IntArray, tokens: IntArray
    ) -> None:
        """Copy the state of `slots` from another runner: int32[n], tokens int32[n, *]; skips slots of another
        generation."""
        same = self.gen[slots] == gens
        slots, lengths = slots[same], lengths[same]
        self.length[slots], self.num_drafts[slots] = lengths, num_drafts[same]
        positions = self._around(lengths)
        inside = positions < self.tokens.shape[1]
        self.tokens[np.broadcast_to(slots[:, None], positions.shape)[inside], positions[inside]] = tokens[same][inside]

    def _around(self, lengths: IntArray) -> IntArray:
        """Return the positions that a step may change: 1 + k tokens before each length and k drafts after it."""
        offsets = np.arange(-1 - self._max_drafts, self._max_drafts, dtype=np.int32)
        positions: IntArray = np.maximum(lengths[:, None] + offsets, np.int32(0))
        return positions

    def guesses(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return all drafts as arguments of `guess`: slots int32[n], drafts int32[n, k], counts int32[n]."""
        slots = np.flatnonzero(self.num_drafts).astype(np.int32)
        counts = self.num_drafts[slots]
        positions = self.length[slots][:, None] + np.arange(counts.max(initial=0))
        return slots, self.tokens[slots[:, None], np.minimum(positions, self.tokens.shape[1] - 1)], counts
