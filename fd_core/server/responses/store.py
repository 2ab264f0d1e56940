"""Answers that later requests may go on from: kept in memory, a bounded number of them, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import msgspec

from fd_core.server.request_schemas import Message
from fd_core.server.responses.schemas import ResponseAnswer

__all__ = ["ResponseStore", "StoredResponse"]

MAX_BYTES: Final = 64 * 2**20
"""Of all that is kept, as JSON."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, and the conversation up to its end, without the instructions."""

    answer: ResponseAnswer
    messages: tuple[Message, ...]


class ResponseStore:
    """At most `capacity` answers and `max_bytes` of them."""

    def __init__(self, capacity: int, max_bytes: int = MAX_BYTES) -> None:
        self.capacity = capacity
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, stored: StoredResponse) -> None:
        """Keep an answer; one that is larger than the store is not kept."""
        size = len(msgspec.json.encode((stored.answer, stored.messages)))
        if size > self._max_bytes or not self.capacity:
            return
        self.delete(stored.answer.id)  # clients choose request ids, and may use one again
        self._kept[stored.answer.id] = (stored, size)
        self._bytes += size
        while len(self._kept) > self.capacity or self._bytes > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self._bytes -= freed

    def get(self, response_id: str) -> StoredResponse | None:
        """Return an answer, None if it is not kept (any more)."""
        found = self._kept.get(response_id)
        return None if found is None else found[0]

    def delete(self, response_id: str) -> bool:
        """Forget an answer; return whether it was kept."""
        found = self._kept.pop(response_id, None)
        self._bytes -= found[1] if found else 0
        return found is not None
