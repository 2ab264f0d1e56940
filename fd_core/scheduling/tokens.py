"""The tokens of one request: one buffer, from the prompt to the last token delivered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fd_core.types import IntArray, frozen

__all__ = ["TokenBuffer"]

_ROOM = 64
"""Tokens that fit behind the first ones before the buffer grows."""


class TokenBuffer:
    """int32 token ids that are only ever appended, so that a view of the first ones never changes."""

    __slots__ = ("_data", "count")

    def __init__(self, tokens: Sequence[int] | IntArray, limit: int) -> None:
        """`limit` is the number of tokens that the request may come to have; `tokens` are copied."""
        self.count = len(tokens)
        self._data = np.empty(max(min(self.count + _ROOM, limit), self.count), np.int32)
        self._data[: self.count] = tokens

    def append(self, token_ids: Sequence[int]) -> None:
        """Append token ids; views that were handed out before stay as they are."""
        count = self.count + len(token_ids)
        if count > len(self._data):
            grown = np.empty(max(count, 2 * len(self._data)), np.int32)
            grown[: self.count] = self._data[: self.count]
            self._data = grown
        if len(token_ids) == 1:
            self._data[self.count] = token_ids[0]
        else:
            self._data[self.count : count] = token_ids
        self.count = count

    def view(self, first: int = 0, upto: int | None = None) -> IntArray:
        """Return int32[upto - first], read-only: the tokens from `first` to `upto`, which is the end if left out."""
        view: IntArray = frozen(self._data[first : self.count if upto is None else upto].view())
        return view
