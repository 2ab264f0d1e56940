"""A store in this process's memory: for tests, and for sharing prefixes beyond the host tier of one engine."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from fd_core.errors import ConfigError
from fd_core.kv.stores.contract import Bytes, Deadline, KVStore, StoreError, StoreStats, Trouble
from fd_core.kv.stores.location import StoreLocation
from fd_core.sizes import format_size

__all__ = ["MemoryStore"]

_DEFAULT_BYTES: Final = 1 << 30


class MemoryStore(KVStore):
    """`memory:` with `max_bytes`, 1 GiB unless given. What was not used for longest goes first."""

    name = "memory"
    shared = False

    def __init__(self, location: StoreLocation) -> None:
        super().__init__(location)
        location.require_known("max_bytes")
        if location.rest:
            raise ConfigError(
                f"{location.shown} names a place, and memory has none", field="--kv-store", hint="write memory:"
            )
        self.limit_bytes = location.size("max_bytes") or _DEFAULT_BYTES
        self._lock = threading.Lock()
        self._values: OrderedDict[bytes, bytes] | None = OrderedDict()
        """From the least to the most recently used; None once closed."""
        self._bytes = 0

    def open(self, timeout: float) -> str:
        """Return how much it may hold."""
        with self._lock:
            self._held()
        return f"memory, at most {format_size(self.limit_bytes)}"

    def get(self, keys: Sequence[bytes], limit: int, timeout: float) -> list[Bytes | None]:
        """Return the stored values themselves; nothing is copied."""
        found: list[Bytes | None] = []
        with self._lock:
            values = self._held()
            for key in keys:
                value = values.get(key)
                if value is not None and len(value) <= limit:
                    values.move_to_end(key)
                    found.append(value)
                else:
                    found.append(None)
        return found

    def put(self, values: Sequence[tuple[bytes, Sequence[Bytes]]], timeout: float) -> int:
        """Copy each value once, then forget old ones until all fit."""
        deadline = Deadline(timeout)
        stored = 0
        for key, parts in values:
            deadline.check()
            value = b"".join(parts)
            with self._lock:
                held = self._held()
                self._forget(key)
                if len(value) > self.limit_bytes:
                    continue
                held[key] = value
                self._bytes += len(value)
                stored += 1
                while self._bytes > self.limit_bytes:
                    self._forget(next(iter(held)))
        return stored

    def longest_prefix(self, keys: Sequence[bytes], limit: int, timeout: float) -> int:
        """Count without touching what was used when."""
        with self._lock:
            values = self._held()
            for index, key in enumerate(keys):
                value = values.get(key)
                if value is None or len(value) > limit:
                    return index
        return len(keys)

    def delete(self, keys: Sequence[bytes], timeout: float) -> int:
        """Forget values."""
        with self._lock:
            self._held()
            return sum(self._forget(key) for key in keys)

    def stats(self, timeout: float) -> StoreStats:
        """Return exact numbers."""
        with self._lock:
            return StoreStats(len(self._held()), self._bytes, self.limit_bytes)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._values = None
            self._bytes = 0

    def _held(self) -> OrderedDict[bytes, bytes]:
        if self._values is None:
            raise StoreError(Trouble.OTHER, "the KV store is closed")
        return self._values

    def _forget(self, key: bytes) -> bool:
        value = self._held().pop(key, None)
        self._bytes -= len(value or b"")
        return value is not None
