"""Index of what each key keeps, in memory, with pages whose cost does not grow with the number of entries."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _IndexEntry(NamedTuple, Generic[T]):
    number: int
    owner: str
    kind: str
    value: T


class OwnedIndex(Generic[T]):
    """Values by id. Each has an owner, who alone sees it, and a kind, by which lists may be narrowed."""

    def __init__(self) -> None:
        self._entries: dict[str, _IndexEntry[T]] = {}
        self._lists: dict[tuple[str, str | None], list[tuple[int, str]]] = {}
        """Numbers and ids in the order in which they were added, by owner and kind; None stands for every kind."""
        self._added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> T:
        return self._entries[name].value

    def owner(self, name: str) -> str:
        """Return the owner of an entry."""
        return self._entries[name].owner

    def get(self, name: str, owner: str) -> T | None:
        """Return a value, None if this owner has none of that id."""
        found = self._entries.get(name)
        return None if found is None or found.owner != owner else found.value

    def put(self, name: str, owner: str, value: T, kind: str = "") -> None:
        """Add a value, or replace the one that has the id."""
        if (old := self._entries.get(name)) is not None:
            self._entries[name] = old._replace(value=value)
            return
        self._added += 1
        self._entries[name] = _IndexEntry(self._added, owner, kind, value)
        for listed in ((owner, None), (owner, kind)):
            self._lists.setdefault(listed, []).append((self._added, name))

    def remove(self, name: str) -> None:
        """Remove an entry."""
        entry = self._entries.pop(name)
        for listed in ((entry.owner, None), (entry.owner, entry.kind)):
            names = self._lists[listed]
            del names[bisect_left(names, (entry.number,))]
            if not names:
                del self._lists[listed]

    def oldest(self, owner: str) -> Iterator[T]:
        """Yield the values of an owner, the oldest first."""
        return (self._entries[name].value for _, name in self._lists.get((owner, None), ()))

    def page(self, owner: str, limit: int, after: str | None, kind: str | None = None) -> tuple[list[T], bool] | None:
        """Return up to `limit` values older than the entry `after`, the newest first, and whether there are more.

        None if the owner has no entry `after`.
        """
        names = self._lists.get((owner, kind), [])
        end = len(names)
        if after is not None:
            entry = self._entries.get(after)
            if entry is None or entry.owner != owner:
                return None
            end = bisect_left(names, (entry.number,))
        begin = max(0, end - limit)
        return [self._entries[name].value for _, name in reversed(names[begin:end])], begin > 0
