"""Accounts of the store: what each key and all keys together keep, against their limits. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from fd_core.http.errors import ApiError

_MOST_SHARES: Final = 4
"""A key may keep an equal share of the store, and never less than one part in so many."""


class Account:
    """Use of one resource of the store, such as bytes. Every use is taken before it happens."""

    def __init__(
        self,
        unit: str,
        limit: int,
        keys: Callable[[], int],
        remedy: str,
        key_limit: int | None = None,
        param: str | None = "file",
    ) -> None:
        """`limit` bounds all keys together and `key_limit` each of them; by default it is a share among `keys()`.

        Refusals name the field `param`.
        """
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
            (self._by_owner[owner], limit, "of one key" if limit < self._limit else "of the store"),
            (self.used, self._limit, "of the store"),
        ):
            if used + more > most:
                kept = f"{used:,} {self._unit} are kept" if more <= most else "it can never fit"
                raise ApiError(
                    429 if more <= most else 413,
                    f"{more:,} more {self._unit} exceed the limit {whose}, {most:,}: {kept}; {self._remedy}",
                    kind="insufficient_quota" if more <= most else "invalid_request_error",
                    param=self._param,
                    code="store_full",
                    headers={"x-should-retry": "false"},
                )

    def take(self, owner: str, more: int) -> None:
        """Count `more` for an owner. Raises `ApiError` as `require` does."""
        self.require(owner, more)
        self.add(owner, more)

    def add(self, owner: str, change: int) -> None:
        """Count what is there already; a negative `change` gives back."""
        self.used += change
        self._by_owner[owner] += change
        if not self._by_owner[owner]:
            del self._by_owner[owner]
