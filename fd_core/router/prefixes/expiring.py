"""A map of bounded size whose entries expire; the entry that was written longest ago leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Expiring"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Expiring(Generic[Key, Value]):
    """At most `capacity` entries, each found for `duration` seconds after it was last put. Every call is O(1).

    The readings of the clock that are passed in never go backwards.
    """

    def __init__(self, *, duration: float, capacity: int) -> None:
        self._duration = duration
        self._capacity = capacity
        self._entries: OrderedDict[Key, tuple[float, Value]] = OrderedDict()

    def __len__(self) -> int:
        """Entries that take memory, expired ones included until a sweep."""
        return len(self._entries)

    def put(self, key: Key, value: Value, now: float) -> None:
        """Write an entry; beyond the capacity the oldest one leaves."""
        self._entries[key] = (now, value)
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def has(self, key: Key, now: float) -> bool:
        """Whether an entry is there and has not expired."""
        entry = self._entries.get(key)
        return entry is not None and now - entry[0] < self._duration

    def get(self, key: Key, now: float) -> Value | None:
        """Return the value of an entry; None if there is none or it has expired."""
        return self._entries[key][1] if self.has(key, now) else None

    def sweep(self, now: float) -> None:
        """Remove all entries that have expired."""
        while self._entries:
            key, (written, _) = next(iter(self._entries.items()))
            if now - written < self._duration:
                return
            del self._entries[key]
