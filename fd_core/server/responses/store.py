"""Answers that later requests may go on from: kept in memory, a bounded number of them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fd_core.server.responses.schemas import ResponseAnswer
from fd_core.server.schemas.requests import Message

MAX_BYTES: Final = 64 * 2**20
"""Of all that is kept, as JSON."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, and the conversation up to its end, without the instructions."""

    answer: ResponseAnswer
    messages: tuple[Message, ...]


@dataclass(slots=True)
class _OwnerAnswers:
    """Answers of one owner, the oldest first, with their bytes."""

    kept: OrderedDict[str, tuple[StoredResponse, int]] = field(default_factory=OrderedDict)
    bytes: int = 0


class ResponseStore:
    """At most `capacity` answers and `max_bytes` of them, each seen by its owner only.

    Without room, the oldest answer of the owner who keeps most is forgotten, so that no key displaces those of others
    beyond an equal share.
    """

    def __init__(self, capacity: int, max_bytes: int = MAX_BYTES) -> None:
        self.capacity = capacity
        self._max_bytes = max_bytes
        self._owners: dict[str, _OwnerAnswers] = {}
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._count

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep an answer of an owner; one that is larger than the store is not kept."""
        size = len(msgspec.json.encode((stored.answer, stored.messages)))
        if size > self._max_bytes or not self.capacity:
            return
        self.delete(owner, stored.answer.id)  # clients choose request ids, and may use one again
        owned = self._owners.setdefault(owner, _OwnerAnswers())
        owned.kept[stored.answer.id] = stored, size
        owned.bytes += size
        self._bytes += size
        self._count += 1
        while self._count > self.capacity:
            self._forget_oldest(max(self._owners, key=lambda each: len(self._owners[each].kept)))
        while self._bytes > self._max_bytes:
            self._forget_oldest(max(self._owners, key=lambda each: self._owners[each].bytes))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return an answer of an owner, None if it is not kept (any more)."""
        owned = self._owners.get(owner)
        found = None if owned is None else owned.kept.get(response_id)
        return None if found is None else found[0]

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget an answer of an owner; return True if it was kept."""
        owned = self._owners.get(owner)
        found = None if owned is None else owned.kept.pop(response_id, None)
        if owned is None or found is None:
            return False
        owned.bytes -= found[1]
        self._bytes -= found[1]
        self._count -= 1
        if not owned.kept:
            del self._owners[owner]
        return True

    def _forget_oldest(self, owner: str) -> None:
        self.delete(owner, next(iter(self._owners[owner].kept)))
