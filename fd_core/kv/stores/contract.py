"""Store contract: named values outside the engine, with a lifetime that the store decides.

A store moves opaque bytes. Their format, integrity and authenticity are checked by the envelope
(`fd_core.kv.stores.envelope`), the same for every store. A store is best effort: it may evict, reject and fail, and may
hold values of other programs; it must not hang.

The core never calls a store while planning, and from two background threads at most: one that reads (`longest_prefix`,
`get`), one that writes (`put`, `delete`). A read does not wait for a write, and no call until another store object of
the location has written the values of a put. Every call receives its timeout.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from fd_core.config.envelope import OperatingEnvelope
from fd_core.deprecations import accept_old_names, old_attributes
from fd_core.errors import FdError
from fd_core.kv.stores.location import StoreLocation

__all__ = ["MAX_KEY_BYTES", "Bytes", "Deadline", "FailureReason", "KVStore", "StoreError", "StoreStats"]

MAX_KEY_BYTES: Final = 32

Bytes = bytes | bytearray | memoryview
"""A contiguous buffer of bytes; not written to after it was passed on."""


class FailureReason(enum.StrEnum):
    """Reason of a failed store call; the label of the failure metric."""

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    """No connection, or it was lost."""
    DENIED = "denied"
    """Wrong credentials, or a missing permission."""
    FULL = "full"
    READ_ONLY = "read_only"
    MALFORMED = "malformed"
    """The data under a key is not a value; for example, it has another type."""
    OTHER = "other"


@accept_old_names
class StoreError(FdError):
    """A call of a store failed. The message never holds a value, a prompt or a secret."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Fill level of a store; None where the store cannot determine it cheaply."""

    values: int | None = None
    bytes: int | None = None
    """Part of the limit that is in use; less than the lengths of the values if they are compressed."""
    limit_bytes: int | None = None


class Deadline:
    """Deadline of a call, for stores whose blocking calls have no timeout."""

    def __init__(self, timeout: float) -> None:
        self._end = time.monotonic() + timeout

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        """Raise `StoreError(FailureReason.TIMEOUT, ...)` if the deadline has passed."""
        if time.monotonic() >= self._end:
            raise StoreError(FailureReason.TIMEOUT, "the KV store call timed out")


class KVStore(abc.ABC):
    """Named values. Keys are digests of 1 to `MAX_KEY_BYTES` bytes; values are at most a few megabytes each.

    A value never changes under its key, except by damage. Files and data at the location that are not values stay.
    Methods raise only `StoreError`. `timeout` is in seconds; a call that exceeds it raises
    `StoreError(FailureReason.TIMEOUT, ...)` and leaves the store usable. The timeout is of the whole call, whatever the
    number of its values. After `close` every call raises, and the store holds no thread, process or descriptor.
    """

    name: str
    """The scheme that users write before the colon of `--kv-store`."""
    shared: bool = True
    """True if stores of the same location in other processes hold the same values."""
    envelope: ClassVar[OperatingEnvelope] = OperatingEnvelope()
    """Largest `value_bytes` that it supports, by default any."""

    def __init__(self, location: StoreLocation) -> None:
        """Parse the location; connects to nothing and creates nothing.

        Raises `ConfigError` for a parameter that is unknown or out of range.
        """
        self.location = location

    @abc.abstractmethod
    def open(self, timeout: float) -> str:
        """Call the store once and return a line for the start-up summary, without secrets; reads no values.

        Raises `StoreError` if the store is unavailable at the moment; the other methods may still be called.
        """

    @abc.abstractmethod
    def get(self, keys: Sequence[bytes], limit: int, timeout: float) -> list[Bytes | None]:
        """Return one value for each key, None for a value that is absent or longer than `limit` bytes.

        A value over the limit is not read into memory. Values may be torn or from other programs: the caller checks
        them. A key whose data is not a value counts as absent or raises `StoreError(FailureReason.MALFORMED, ...)`.
        """

    @abc.abstractmethod
    def put(self, values: Sequence[tuple[bytes, Sequence[Bytes]]], timeout: float) -> int:
        """Store each value, the concatenation of its parts, under its key; return how many were stored.

        Writes are atomic for readers. An existing value is replaced, which repairs a damaged one. A value larger than
        the store's limit is skipped; if there is no space for another reason, the call raises `StoreError(Trouble.FULL,
        ...)`.
        """

    @abc.abstractmethod
    def longest_prefix(self, keys: Sequence[bytes], limit: int, timeout: float) -> int:
        """Return how many leading keys have a value of at most `limit` bytes, without reading the values.

        The count ends at the first key whose value is absent, longer, or not a value.
        """

    @abc.abstractmethod
    def delete(self, keys: Sequence[bytes], timeout: float) -> int:
        """Delete values, including damaged ones, whose space serves later ones; return how many existed."""

    @abc.abstractmethod
    def stats(self, timeout: float) -> StoreStats:
        """Return the fill level of the store; values that were deleted or evicted do not count."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close connections and handles; idempotent."""


__getattr__ = old_attributes(__name__)
