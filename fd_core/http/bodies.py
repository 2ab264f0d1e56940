"""One budget of memory for all bodies that are being received."""

from __future__ import annotations

from typing import Annotated, Final, Self

import msgspec

from fd_core.http.errors import ApiError, unavailable
from fd_core.http.headers import length_of
from fd_core.types.metrics import counter, gauge

_FREE_BYTES: Final = 64 * 1024
"""Unbudgeted bytes of each body, so that small requests proceed while large ones use up the budget."""


class BodyStats(msgspec.Struct):
    """Usage of the budget."""

    used: Annotated[int, gauge("body_memory_bytes", "Memory used or announced by bodies being received.")] = 0
    refused: Annotated[int, counter("bodies_refused", "Bodies rejected because the memory for bodies was full.")] = 0


class BodyBudget:
    """Bytes that bodies may hold together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.stats = BodyStats()

    def share(self, announced: str | None, largest: int) -> BodyShare:
        """Return a share for a body of the length `announced`; `ApiError`: 413 beyond `largest`, 503 without room."""
        share = BodyShare(self, largest)
        if announced is not None and (length := length_of(announced)) is not None:
            share.reserve(length)
        return share


class BodyShare(msgspec.Struct, eq=False):
    """Share of one body in the budget; a context manager that returns it."""

    _budget: BodyBudget
    _largest: int
    _received: int = 0
    _reserved: int = 0
    _held: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def received(self, count: int) -> None:
        """Count received bytes. Raises `ApiError` as `BodyBudget.share` does."""
        self._received += count
        if self._received > self._reserved:
            self.reserve(self._received)

    def reserve(self, size: int) -> None:
        """Count a body of `size` bytes. Raises `ApiError` as `BodyBudget.share` does."""
        if size > self._largest:
            message = f"the body exceeds {self._largest:,} bytes; see --max-body-size"
            raise ApiError(413, message, code="body_too_large")
        self._reserved = size
        more = size - _FREE_BYTES - self._held
        if more <= 0:
            return
        stats = self._budget.stats
        if stats.used + more > self._budget.limit:
            stats.refused += 1
            raise unavailable("the memory for request bodies is full; retry later", "body_memory", retry_after=1)
        stats.used += more
        self._held += more

    def release(self) -> None:
        """Return the memory held; further calls have no effect."""
        self._budget.stats.used -= self._held
        self._held = 0
