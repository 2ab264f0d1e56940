"""The tokens of requests: a buffer for each request, and one matrix for the tokens that steps deliver to all slots."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fd_core.types import IntArray

_SPARE_TOKENS: Final = 64
"""Spare tokens of a new buffer before it grows, and delivered tokens before a buffer takes them; no step
delivers as many to one slot."""


class TokenBuffer:
    """int32 token ids that are only ever appended, so that a view of the first ones never changes.

    While its request holds a slot, the newest tokens may be in the `DeliveredTokens` of the slots; every read
    includes them.
    """

    __slots__ = ("_data", "_delivered", "row", "slot", "taken")

    def __init__(self, tokens: Sequence[int] | IntArray, limit: int) -> None:
        """`limit` is the maximum number of tokens of the request; `tokens` are copied."""
        self.taken = len(tokens)
        """Tokens that are in the buffer."""
        self._data = np.empty(max(min(self.taken + _SPARE_TOKENS, limit), self.taken), np.int32)
        if isinstance(tokens, tuple):  # half of the time that an array takes to convert them one by one
            tokens = np.frombuffer(struct.pack(f"={self.taken}i", *tokens), np.int32)
        self._data[: self.taken] = tokens
        self._delivered: DeliveredTokens | None = None
        self.row: npt.NDArray[np.intp] | None = None
        """intp[slots]: number of tokens in the row of each slot, while the request holds one."""
        self.slot = -1

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.taken if self.row is None else self.taken + int(self.row[self.slot])

    def append(self, token_ids: Sequence[int] | IntArray) -> None:
        """Append token ids; earlier views do not change."""
        self.take_delivered()
        self._append(token_ids)

    def view(self, first: int = 0, upto: int | None = None) -> IntArray:
        """Return int32[upto - first], read-only: the tokens from `first` to `upto`, which is the end if left out."""
        self.take_delivered()
        view = self._data[first : self.taken if upto is None else upto]
        view.setflags(write=False)
        return view

    def attach(self, delivered: DeliveredTokens, slot: int) -> None:
        """Attach the request to its slot: its next tokens arrive in row `slot` of `delivered`."""
        self._delivered, self.row, self.slot = delivered, delivered.counts, slot

    def detach(self) -> None:
        """Detach the request from its slot; all its tokens are in the buffer afterwards."""
        self.take_delivered()
        self._delivered, self.row, self.slot = None, None, -1

    def take_delivered(self) -> None:
        """Move the tokens in the row of the request's slot to the buffer."""
        if self.row is not None and self._delivered is not None and (count := int(self.row[self.slot])):
            self.row[self.slot] = 0
            self._append(self._delivered.tokens[self.slot, :count])

    def _append(self, token_ids: Sequence[int] | IntArray) -> None:
        count = self.taken + len(token_ids)
        if count > len(self._data):
            grown = np.empty(max(count, 2 * len(self._data)), np.int32)
            grown[: self.taken] = self._data[: self.taken]
            self._data = grown
        self._data[self.taken : count] = token_ids
        self.taken = count


class DeliveredTokens:
    """Tokens that steps delivered to the slots and that the buffers of their requests have not taken yet.

    A step appends to thousands of requests. One write into one matrix costs less than a write into the buffer of each;
    a buffer takes its row when its tokens are read, which is once in a KV block.
    """

    def __init__(self, num_slots: int) -> None:
        self.tokens = np.zeros((num_slots, _SPARE_TOKENS), np.int32)
        """int32[num_slots, room]: a row for each slot."""
        self.counts = np.zeros(num_slots, np.intp)
        """intp[num_slots]: number of tokens in each row."""
        self.min_free_columns = _SPARE_TOKENS
        """Lower bound of the free columns of every row."""

    def full_rows(self, rows: npt.NDArray[np.intp], width: int) -> list[int]:
        """Return those of `rows` without room for `width` more tokens: their buffers have to take theirs first."""
        self.min_free_columns = self.tokens.shape[1] - int(self.counts.max())
        slots: list[int] = rows[self.counts[rows] + width > self.tokens.shape[1]].tolist()
        return slots

    def append(self, rows: npt.NDArray[np.intp], tokens: IntArray, counts: IntArray) -> None:
        """Append to each row of `rows` intp[n] the first `counts` int32[n] of its `tokens` int32[n, width]."""
        first = self.counts[rows]
        if tokens.shape[1] == 1:
            self.tokens[rows, first] = tokens[:, 0]
        else:
            # Entries after the count of a row are written, too: the next append overwrites them.
            self.tokens[rows[:, None], first[:, None] + np.arange(tokens.shape[1])] = tokens
        self.counts[rows] = first + counts
        self.min_free_columns -= tokens.shape[1]
