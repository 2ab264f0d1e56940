"""Token sequences that a text must not contain: which token may not come next."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fd_core.types import IntArray


class Bans:
    """The banned sequences of one request. What is banned next depends on the tokens of its own text only."""

    def __init__(self, sequences: Iterable[tuple[int, ...]], begin: int) -> None:
        """`begin` is the position where the text begins, behind the prompt."""
        self._begin = begin
        self._always: list[int] = []
        self._behind: dict[int, list[tuple[list[int], int]]] = {}
        """By the last token but one: the sequence without its last token, and that token."""
        for *before, last in sequences:
            if before:
                self._behind.setdefault(before[-1], []).append((before, last))
            else:
                self._always.append(last)

    @property
    def read_text(self) -> bool:
        """Whether what is banned next depends on the tokens before it."""
        return bool(self._behind)

    def at(self, position: int, tokens: IntArray) -> IntArray:
        """Return the tokens int32[n] that may not stand at `position`, behind those of `tokens` before it."""
        banned = self._always
        if self._behind and position > self._begin:
            banned = banned + [
                last
                for before, last in self._behind.get(int(tokens[position - 1]), ())
                if position - len(before) >= self._begin
                and tokens[position - len(before) : position].tolist() == before
            ]
        return np.array(banned, np.int32)
