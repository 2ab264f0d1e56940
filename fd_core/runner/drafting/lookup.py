"""Drafts from the text itself: the tokens after the latest same n-gram, or after the longest repeated suffix."""

from __future__ import annotations

from typing import Final

import numpy as np

from fd_core.runner.drafting.contract import DraftContext, PerSlotDrafter
from fd_core.types import IntArray

_LONGEST: Final = 32
"""Limit of an n-gram: each token of a text adds one of every size to the table."""


class NgramDrafter(PerSlotDrafter):
    """Prompt lookup: the tokens after the latest occurrence of the same n-gram (Saxena, 2023).

    Options: `prompt_lookup_max` (longest n-gram tried first, 4) and `prompt_lookup_min` (shortest, 2). The cost per
    token does not depend on the length of the text: a table maps every n-gram to the position after its latest
    occurrence.
    """

    name = "ngram"
    options = ("prompt_lookup_max", "prompt_lookup_min")

    def __init__(self, context: DraftContext) -> None:
        longest = context.whole("prompt_lookup_max", 4, _LONGEST)
        shortest = context.whole("prompt_lookup_min", min(2, longest), longest)
        self._sizes = range(longest, shortest - 1, -1)
        self._texts: list[list[int]] = [[] for _ in range(context.num_slots)]
        self._last_seen: list[dict[tuple[int, ...], int]] = [{} for _ in range(context.num_slots)]

    def admit(self, slot: int, tokens: IntArray) -> None:
        self._texts[slot] = []
        self._last_seen[slot] = {}
        self.grow(slot, tokens)

    def grow(self, slot: int, tokens: IntArray) -> None:
        text, places = self._texts[slot], self._last_seen[slot]
        for token in tokens.tolist():
            end = len(text)
            for size in self._sizes:
                if end >= size:
                    places[tuple(text[end - size : end])] = end
            text.append(token)

    def guess(self, slot: int, limit: int) -> IntArray:
        text, places = self._texts[slot], self._last_seen[slot]
        for size in self._sizes:
            place = places.get(tuple(text[-size:]))
            if place is not None:
                return np.array(text[place : place + limit], np.int32)
        return np.empty(0, np.int32)


class SuffixDrafter(PerSlotDrafter):
    """Return the tokens after the earliest occurrence of the longest suffix that occurred before.

    A suffix automaton of each request's text (Blumer et al., 1985), grown token by token in amortised constant time:
    the suffix link of its last state is exactly that suffix. Option: `min_match`, tokens that must agree (2).
    """

    name = "suffix"
    options = ("min_match",)

    def __init__(self, context: DraftContext) -> None:
        self._min_match = context.whole("min_match", 2)
        self._automata = [_SuffixAutomaton() for _ in range(context.num_slots)]

    def admit(self, slot: int, tokens: IntArray) -> None:
        self._automata[slot] = _SuffixAutomaton()
        self.grow(slot, tokens)

    def grow(self, slot: int, tokens: IntArray) -> None:
        automaton = self._automata[slot]
        for token in tokens.tolist():
            automaton.append(token)

    def guess(self, slot: int, limit: int) -> IntArray:
        automaton = self._automata[slot]
        length, place = automaton.earlier_suffix()
        if length < self._min_match:
            return np.empty(0, np.int32)
        return np.array(automaton.text[place : place + limit], np.int32)


class _SuffixAutomaton:
    """The smallest automaton of all suffixes of a growing text; states are indices into parallel lists."""

    __slots__ = ("_first_end", "_last", "_length", "_link", "_next", "text")

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._first_end = [0]
        """Position after the first occurrence of a state's strings."""
        self._last = 0

    def append(self, token: int) -> None:
        self.text.append(token)
        state = self._add({}, len(self.text), len(self.text))
        walk = self._last
        while walk >= 0 and token not in self._next[walk]:
            self._next[walk][token] = state
            walk = self._link[walk]
        if walk >= 0:
            self._link[state] = self._target(walk, token)
        else:
            self._link[state] = 0
        self._last = state

    def earlier_suffix(self) -> tuple[int, int]:
        """Return length, and position after the first occurrence, of the longest suffix that occurred before."""
        link = self._link[self._last]
        return self._length[link], self._first_end[link]  # 0 and 0 of the root, also by its own link of -1

    def _add(self, transitions: dict[int, int], length: int, first_end: int) -> int:
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._first_end.append(first_end)
        return len(self._next) - 1

    def _target(self, walk: int, token: int) -> int:
        """Return the state of exactly the strings of `walk` followed by `token`, splitting one if necessary."""
        old = self._next[walk][token]
        if self._length[old] == self._length[walk] + 1:
            return old
        clone = self._add(dict(self._next[old]), self._length[walk] + 1, self._first_end[old])
        self._link[clone] = self._link[old]
        self._link[old] = clone
        while walk >= 0 and self._next[walk].get(token) == old:
            self._next[walk][token] = clone
            walk = self._link[walk]
        return clone
