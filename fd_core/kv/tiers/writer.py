"""Write-behind queue: saved blocks are written to the store later, or dropped."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fd_core.effects.port import OnceLogger
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.tiers.guarded_store import GuardedStore
from fd_core.kv.tiers.host import HostArray
from fd_core.kv.tiers.stats import TierStats

_GRACE_SECONDS = 0.3
"""Grace period in seconds after the timeout of a store call, while the writer closes."""
_NEVER = float("inf")
_MAX_FORGOTTEN = 1024
"""Maximum number of pending deletions; a damaged value over it stays until it is read again."""


@dataclass
class WriteBehind:
    """Blocks that wait to be written to the store, `limit_bytes` at most, and the loop that puts and deletes.

    Blocks that do not fit or cannot be written are dropped and counted.
    """

    loop: ThreadLoop
    _store: GuardedStore
    _envelope: Envelope
    _stats: TierStats
    _logger: OnceLogger
    limit_bytes: int
    batch: int
    put_seconds: float
    lost: Callable[[Sequence[bytes]], None]
    """Called with the keys of blocks that were accepted and may not have been written, on any thread."""
    clock: Callable[[], float]
    pending_bytes: int = 0
    """Bytes of blocks that were accepted and neither written nor dropped."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[bytes, HostArray]] = deque()
        self._queued: set[bytes] = set()
        self._forgotten: set[bytes] = set()
        """Keys that wait to be deleted."""
        self._give_up_at = _NEVER

    def accepts(self, size: int) -> bool:
        """Return True if `offer` would take a block of `size` bytes. Reliable on the one thread that calls `offer`."""
        return self.pending_bytes + size <= self.limit_bytes and self._store.ready()

    def offer(self, key: bytes, array: HostArray) -> bool:
        """Queue a block to be written; return False if the block is dropped. Never blocks."""
        if key in self._queued:
            return True
        if not self.accepts(array.nbytes):
            return False
        with self._lock:
            self._queue.append((key, array))
            self._queued.add(key)
            # The block replaces the stored value; a deletion after it would lose the block.
            self._forgotten.discard(key)
            self.pending_bytes += array.nbytes
        self.loop.post(self._write)
        return True

    def drop(self, count: int) -> None:
        """Count blocks that are not written, as they could not be offered."""
        with self._lock:
            self._stats.dropped_blocks += count

    def forget(self, key: bytes) -> None:
        """Queue a key for deletion from the store, unless a block is written under it anyway; best effort."""
        with self._lock:
            if key in self._queued or key in self._forgotten or len(self._forgotten) >= _MAX_FORGOTTEN:
                return
            self._forgotten.add(key)
        self.loop.post(lambda: self._delete(key))

    def close(self, seconds: float) -> bool:
        """Write what is pending for at most `seconds`, drop the rest; return whether the loop ended."""
        self._give_up_at = self.clock() + seconds
        self.loop.stop()
        ended = self.loop.join(seconds + _GRACE_SECONDS)
        while batch := self._take():
            self._settle(batch, 0)
        return ended

    def _write(self) -> None:
        if batch := self._take():
            stored = 0
            try:
                stored = self._put(batch)
            finally:
                self._settle(batch, stored)

    def _put(self, batch: Sequence[tuple[bytes, HostArray]]) -> int:
        left = self._give_up_at - self.clock()
        if left <= 0 or not self._store.ready():
            return 0
        values = [(key, self._envelope.seal(key, array.data.cast("B"))) for key, array in batch]

        def put(store: KVStore, timeout: float) -> int:
            stored = store.put(values, timeout)
            if not isinstance(stored, int) or not 0 <= stored <= len(values):
                raise ValueError("put returned an invalid number of values")
            return stored

        stored = self._store.call("put", min(self.put_seconds, left), put)
        if stored == 0:
            size = sum(memoryview(part).nbytes for part in values[0][1])
            self._logger.warn(
                f"a KV block of {size:,} bytes exceeds the limit of the KV store, so nothing is "
                "stored; free disk space or raise the limit"
            )
        return stored or 0

    def _delete(self, key: bytes) -> None:
        with self._lock:
            wanted = key in self._forgotten
            self._forgotten.discard(key)
        if wanted and self._give_up_at == _NEVER:  # not at shutdown
            self._store.call("delete", self.put_seconds, lambda store, timeout: store.delete([key], timeout))

    def _take(self) -> list[tuple[bytes, HostArray]]:
        with self._lock:
            return [self._queue.popleft() for _ in range(min(self.batch, len(self._queue)))]

    def _settle(self, batch: Sequence[tuple[bytes, HostArray]], stored: int) -> None:
        with self._lock:
            for key, array in batch:
                self._queued.discard(key)
                self.pending_bytes -= array.nbytes
            self._stats.written_blocks += stored
            self._stats.dropped_blocks += len(batch) - stored
        if stored < len(batch):  # the store does not report which of them it has
            self.lost([key for key, _ in batch])
