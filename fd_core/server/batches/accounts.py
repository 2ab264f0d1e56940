"""Usage of each key and of all keys together: accounts against their limits, and an index in memory. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from fd_core.http.errors import ApiError

T = TypeVar("T")
_MOST_SHARES: Final = 4
"""The limit of a key is an equal share of the store, and never less than this part of it: one in so many."""


class Account:
    """Use of one resource of the store, such as bytes. Every use is reserved before it happens."""

    def __init__(
        self,
        unit: str,
        limit: int,
        keys: Callable[[], int],
        remedy: str,
        key_limit: int | None = None,
        param: str | None = "file",
    ) -> None:
        """`limit` bounds all keys, `key_limit` each, by default a share among `keys()`. Errors name `param`."""
        self._unit = unit
        self._limit = limit
        self._keys = keys
        self._remedy = remedy
        self._key_limit = key_limit
        self._param = param
        self.used = 0
        self._by_owner: Counter[str] = Counter()

    def used_by(self, owner: str) -> int:
        """Return the use of one owner."""
        return self._by_owner[owner]

    @property
    def key_limit(self) -> int:
        """The limit of one key."""
        if self._key_limit is not None:
            return min(self._key_limit, self._limit)
        return self._limit // min(max(1, self._keys()), _MOST_SHARES)

    def require(self, owner: str, more: int) -> None:
        """Raise `ApiError` if there is no room: 413 if `more` never fits, 429 while too much else is kept."""
        limit = self.key_limit
        for used, most, whose in (
            (self._by_owner[owner], limit, "per key" if limit < self._limit else "of the store"),
            (self.used, self._limit, "of the store"),
        ):
            if used + more > most:
                kept = f"{used:,} {self._unit} are in use" if more <= most else "it can never fit"
                raise ApiError(
                    429 if more <= most else 413,
                    f"{more:,} more {self._unit} exceed the limit {whose} ({most:,}): {kept}; {self._remedy}",
                    kind="insufficient_quota" if more <= most else "invalid_request_error",
                    param=self._param,
                    code="store_full",
                    headers={"x-should-retry": "false"},
                )

    def take(self, owner: str, more: int) -> None:
        """Reserve `more` for an owner. Raises `ApiError` as `require` does."""
        self.require(owner, more)
        self.add(owner, more)

    def add(self, owner: str, change: int) -> None:
        """Add existing use; a negative `change` frees it."""
        self.used += change
        self._by_owner[owner] += change
        if not self._by_owner[owner]:
            del self._by_owner[owner]


class _IndexEntry(NamedTuple, Generic[T]):
    number: int
    owner: str
    kind: str
    value: T


class OwnedIndex(Generic[T]):
    """Values by id and kind, each visible only to its owner; the cost of a page does not grow with their number."""

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
        self._entries[name] = _IndexEntry(self._added, owner, kind, value=value)
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

    def page(
        self, owner: str, limit: int, after: str | None, kind: str | None = None, *, oldest_first: bool = False
    ) -> tuple[list[T], bool] | None:
        """Return up to `limit` values that follow `after` in this order, and if there are more; None without `after`.

        The newest is first, or the oldest.
        """
        names = self._lists.get((owner, kind), [])
        begin, end = 0, len(names)
        if after is not None:
            entry = self._entries.get(after)
            if entry is None or entry.owner != owner:
                return None
            begin = bisect_left(names, (entry.number + 1,)) if oldest_first else 0
            end = end if oldest_first else bisect_left(names, (entry.number,))
        more = end - begin > limit
        page = names[begin : begin + limit] if oldest_first else names[max(begin, end - limit) : end][::-1]
        return [self._entries[name].value for _, name in page], more
