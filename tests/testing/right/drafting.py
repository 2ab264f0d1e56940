"""Correct drafters that differ from those of the core."""

from __future__ import annotations

import numpy as np

from fd_core.runner.drafting import Drafter


class DraftsFromOneMatrix(Drafter):
    """Keeps the texts of all slots in a matrix; what follows the drafts in its results is garbage."""

    name = "matrix"

    def __init__(self, context):
        self._texts = np.zeros((context.num_slots, 64), np.int64)
        self._lengths = np.zeros(context.num_slots, np.int64)
        self._after = [{} for _ in range(context.num_slots)]

    def admit(self, slot, tokens):
        self._lengths[slot] = 0
        self._after[slot].clear()
        self._append(slot, tokens)

    def extend(self, slots, tokens, counts):
        for slot, row, count in zip(slots.tolist(), tokens, counts.tolist(), strict=True):
            self._append(slot, row[:count])

    def _append(self, slot, tokens):
        begin = int(self._lengths[slot])
        self._lengths[slot] = end = begin + len(tokens)
        while end > self._texts.shape[1]:
            self._texts = np.hstack([self._texts, np.zeros_like(self._texts)])
        self._texts[slot, begin:end] = tokens
        text = self._texts[slot, max(0, begin - 2) : end].tolist()
        for place, pair in enumerate(zip(text, text[1:], text[2:], strict=False), max(2, begin)):
            self._after[slot][pair[:2]] = place

    def propose(self, slots, limit):
        drafts, counts = np.full((len(slots), limit), -5, np.int32), np.zeros(len(slots), np.int32)
        for row, slot in enumerate(slots.tolist()):
            text = self._texts[slot, : self._lengths[slot]]
            place = self._after[slot].get(tuple(text[-2:].tolist()))
            found = text[place : place + limit] if place is not None else ()
            drafts[row, : len(found)], counts[row] = found, len(found)
        return drafts, counts
