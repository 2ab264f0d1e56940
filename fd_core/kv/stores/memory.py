"""Store in this process's memory: for tests, and to share prefixes between the engines of one process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from fd_core.config.sizes import format_size
from fd_core.errors import ConfigError
from fd_core.kv.stores.contract import Bytes, Deadline, FailureReason, KVStore, StoreError, StoreStats
from fd_core.kv.stores.location import StoreLocation

_DEFAULT_BYTES: Final = 1 << 30


class MemoryStore(KVStore):
    """`memory:` with `max_bytes`, by default 1 GiB. The least recently used values are deleted first."""

    name = "memory"
    shared = False

    def __init__(self, location: StoreLocation) -> None:
        super().__init__(location)
        location.require_known("max_bytes")
        if location.rest:
            raise ConfigError(
                f"{location.shown} has a path, but a memory store has none", field="--kv-store", hint="write memory:"
            )
        self.limit_bytes = location.size("max_bytes") or _DEFAULT_BYTES
        self._lock = threading.Lock()
        self._values: OrderedDict[bytes, bytes] | None = OrderedDict()
        """Values by key, least recently used first; None once the store is closed."""
        self._bytes = 0

    def open(self, timeout: float) -> str:
        """Return a line with the store's limit."""
        with self._lock:
            self._opened()
        return f"memory, at most {format_size(self.limit_bytes)}"

    def get(self, keys: Sequence[bytes], limit: int, timeout: float) -> list[Bytes | None]:
        """Return the stored values without copying them."""
        found: list[Bytes | None] = []
        with self._lock:
            values = self._opened()
            for key in keys:
                value = values.get(key)
                if value is not None and len(value) <= limit:
                    values.move_to_end(key)
                    found.append(value)
                else:
                    found.append(None)
        return found

    def put(self, values: Sequence[tuple[bytes, Sequence[Bytes]]], timeout: float) -> int:
        """Copy each value once, then delete old ones until the limit holds."""
        deadline = Deadline(timeout)
        stored = 0
        for key, parts in values:
            deadline.check()
            value = b"".join(parts)
            with self._lock:
                stored_values = self._opened()
                self._delete(key)
                if len(value) > self.limit_bytes:
                    continue
                stored_values[key] = value
                self._bytes += len(value)
                stored += 1
                while self._bytes > self.limit_bytes:
                    self._delete(next(iter(stored_values)))
        return stored

    def longest_prefix(self, keys: Sequence[bytes], limit: int, timeout: float) -> int:
        """Count leading keys; this does not count as a use of their values."""
        with self._lock:
            values = self._opened()
            for index, key in enumerate(keys):
                value = values.get(key)
                if value is None or len(value) > limit:
                    return index
        return len(keys)

    def delete(self, keys: Sequence[bytes], timeout: float) -> int:
        """Delete values."""
        with self._lock:
            self._opened()
            return sum(self._delete(key) for key in keys)

    def stats(self, timeout: float) -> StoreStats:
        """Return exact numbers."""
        with self._lock:
            return StoreStats(len(self._opened()), self._bytes, self.limit_bytes)

    def keys(self) -> list[bytes]:
        """Return the key of every value, least recently used first."""
        with self._lock:
            return list(self._opened())

    def close(self) -> None:
        """Delete everything."""
        with self._lock:
            self._values = None
            self._bytes = 0

    def _opened(self) -> OrderedDict[bytes, bytes]:
        if self._values is None:
            raise StoreError(FailureReason.OTHER, "the KV store is closed")
        return self._values

    def _delete(self, key: bytes) -> bool:
        value = self._opened().pop(key, None)
        self._bytes -= len(value or b"")
        return value is not None
