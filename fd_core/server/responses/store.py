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
    """At most `capacity` answers and `max_bytes` of them, each seen by its owner only."""

    def __init__(self, capacity: int, max_bytes: int = MAX_BYTES) -> None:
        self.capacity = capacity
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep an answer of an owner's; one that is larger than the store is not kept."""
        size = len(msgspec.json.encode((stored.answer, stored.messages)))
        if size > self._max_bytes or not self.capacity:
            return
        self.delete(owner, stored.answer.id)  # clients choose request ids, and may use one again
        self._kept[owner, stored.answer.id] = (stored, size)
        self._bytes += size
        while len(self._kept) > self.capacity or self._bytes > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self._bytes -= freed

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return an answer of an owner's, None if it is not kept (any more)."""
        found = self._kept.get((owner, response_id))
        return None if found is None else found[0]

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget an answer of an owner's; return whether it was kept."""
        found = self._kept.pop((owner, response_id), None)
        self._bytes -= found[1] if found else 0
        return found is not None
