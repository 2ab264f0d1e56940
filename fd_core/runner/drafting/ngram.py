"""Drafts from the text itself: what followed the same few tokens last time."""

from __future__ import annotations

import numpy as np

from fd_core.runner.drafting.contract import DraftContext, PerSlotDrafter
from fd_core.types import IntArray


class NgramDrafter(PerSlotDrafter):
    """Prompt lookup: what followed the last time the same n tokens were seen (Saxena, 2023).

    Options: `prompt_lookup_max` (longest n-gram tried first, 4) and `prompt_lookup_min` (shortest, 2). A token costs
    the same however long the text is: every n-gram is kept in a table with the place behind its latest occurrence.
    """

    name = "ngram"
    options = ("prompt_lookup_max", "prompt_lookup_min")

    def __init__(self, context: DraftContext) -> None:
        longest, shortest = context.whole("prompt_lookup_max", 4), context.whole("prompt_lookup_min", 2)
        self._sizes = range(longest, shortest - 1, -1)
        self._texts: list[list[int]] = [[] for _ in range(context.num_slots)]
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in range(context.num_slots)]

    def admit(self, slot: int, tokens: IntArray) -> None:
        self._texts[slot] = []
        self._places[slot] = {}
        self.grow(slot, tokens)

    def grow(self, slot: int, tokens: IntArray) -> None:
        text, places = self._texts[slot], self._places[slot]
        for token in tokens.tolist():
            end = len(text)
            for size in self._sizes:
                if end >= size:
                    places[tuple(text[end - size : end])] = end
            text.append(token)

    def guess(self, slot: int, limit: int) -> IntArray:
        text, places = self._texts[slot], self._places[slot]
        for size in self._sizes:
            place = places.get(tuple(text[-size:])) if len(text) >= size else None
            if place is not None:
                return np.array(text[place : place + limit], np.int32)
        return np.empty(0, np.int32)
