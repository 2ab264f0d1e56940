"""Penalties on tokens that were seen: counts of each residency, kept on the device and updated by what is sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fd_core.ops.contract import Array, Ops, PenaltyInput
from fd_core.types import Admission, IntArray

Counting = tuple[Array, Array, Array]
"""Rows of counts, the rows of tokens that are counted there, and twos: int32[n] each."""

_FEWEST_ROWS = 8
"""Rows of counts that are allocated at first."""


class Penalties:
    """Columns over slots, and one row of counts for each slot whose request is penalized.

    A row takes 4 bytes for each token of the vocabulary. Rows are allocated when they are first needed, twice as many
    each time, and a slot keeps its row until its next request is admitted.
    """

    def __init__(self, ops: Ops, num_slots: int, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._repetition = np.ones(num_slots, np.float32)
        self._presence = np.zeros(num_slots, np.float32)
        self._frequency = np.zeros(num_slots, np.float32)
        self._row_of = np.full(num_slots, -1, np.int32)
        """Row of counts of each slot; -1 for a request without penalties."""
        self._free: list[int] = []
        self.num_rows = 0
        """Rows of counts; 0 as long as no request was penalized, when nothing below has anything to do but `admit`."""
        self._counts: Array = None
        """int32[num_rows, V] as `PenaltyInput.counts`."""

    def admit(self, admission: Admission) -> None:
        """Count the tokens of a residency that begins; forget the one before."""
        slot, params = admission.slot, admission.params
        if self._row_of[slot] >= 0:
            self._free.append(int(self._row_of[slot]))
            self._row_of[slot] = -1
        if not params.penalized:
            return
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        prompt, generated = np.split(admission.token_ids, [admission.prompt_len])
        counts = 2 * np.bincount(generated, minlength=self._vocab_size).astype(np.int32)
        counts[prompt] |= 1
        row = self._take_row()
        self._row_of[slot] = row
        self._counts = self._ops.write_rows(self._counts, *self._ops.upload([np.array([row], np.int32), counts[None]]))

    def extend(self, slots: IntArray, tokens: IntArray, accepted: IntArray) -> None:
        """Count delivered tokens: int32[N, 1 + k], of which row i keeps the first 1 + accepted[i]."""
        rows = self._row_of[slots]
        kept = (np.arange(tokens.shape[1]) <= accepted[:, None]) & (rows >= 0)[:, None]
        ids = tokens[kept]
        if len(ids):
            rows = np.repeat(rows, kept.sum(axis=1))
            self._add(*self._ops.upload([rows, ids, np.full(len(ids), 2, np.int32)]))

    def counting(self, slots: IntArray) -> Counting | None:
        """Return what `count` needs, on the host, for a token of each of `slots`; None if none is penalized."""
        penalized = (self._row_of[slots] >= 0).nonzero()[0].astype(np.int32)
        if not len(penalized):
            return None
        return self._row_of[slots[penalized]], penalized, np.full(len(penalized), 2, np.int32)

    def count(self, counting: Counting, tokens: Array) -> None:
        """Count tokens int32[N] that are on the device, one of each slot that `counting` was made of."""
        rows, penalized, twos = counting
        self._add(rows, self._ops.gather_rows(tokens, penalized), twos)

    def gather(self, slots: IntArray, positions: IntArray, columns: IntArray, tokens: IntArray) -> PenaltyInput | None:
        """Return, on the host, what `apply` needs for R rows of logits, but for counts; None if none is penalized.

        See `Sampler.gather` for the arguments. The token in column c of a slot follows c drafts, which stand in
        `tokens` before its position.
        """
        rows = (self._row_of[slots] >= 0).nonzero()[0].astype(np.int32)
        if not len(rows):
            return None
        slots, columns = slots[rows], columns[rows]
        draft_rows = np.repeat(np.arange(len(rows), dtype=np.int32), columns)
        behind = np.arange(len(draft_rows)) - (np.cumsum(columns) - columns)[draft_rows]
        places = (positions[rows] - columns)[draft_rows] + behind
        return PenaltyInput(
            rows=rows,
            counts=None,
            counts_rows=self._row_of[slots],
            draft_rows=draft_rows,
            draft_ids=tokens[slots[draft_rows], places],
            repetition=self._repetition[slots],
            presence=self._presence[slots],
            frequency=self._frequency[slots],
        )

    def apply(self, logits: Array, penalties: PenaltyInput) -> Array:
        """Penalize the logits of rows whose request asked for it; `penalties` is what `gather` returned, uploaded."""
        return self._ops.penalize(logits, replace(penalties, counts=self._counts))

    def _add(self, rows: Array, ids: Array, twos: Array) -> None:
        self._counts = self._ops.add_at(self._counts, rows, ids, twos)

    def _take_row(self) -> int:
        """Return a row of counts that no slot has; what it holds means nothing."""
        if not self._free:
            old, new = self.num_rows, min(max(2 * self.num_rows, _FEWEST_ROWS), len(self._row_of))
            if old:
                self._counts = self._ops.gather_rows(
                    self._counts, self._ops.from_host(np.arange(new, dtype=np.int32) % old)
                )
            else:
                self._counts = self._ops.from_host(np.zeros((new, self._vocab_size), np.int32))
            self._free = list(range(new - 1, old - 1, -1))
            self.num_rows = new
        return self._free.pop()
