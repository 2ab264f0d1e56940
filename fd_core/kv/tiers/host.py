"""The host tier: KV blocks in this process's memory; the least recently used are evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

HostArray = npt.NDArray[Any]


class HostTier:
    """Read-only arrays by block key, `limit_bytes` in all at most. Owned by one thread; makes no copies.

    A prefix is useless without its first block, so call `touch` with the keys of a prefix in order: the last block is
    then evicted first.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._arrays: OrderedDict[bytes, HostArray] = OrderedDict()
        self._written: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._arrays)

    def __contains__(self, key: bytes) -> bool:
        return key in self._arrays

    def get(self, key: bytes) -> HostArray | None:
        """Return the array of `key` or None; does not count as a use."""
        return self._arrays.get(key)

    def put(self, key: bytes, array: HostArray) -> bool:
        """Store `array` as the most recently used, unless it is there or too large; return whether `key` is there."""
        if key in self._arrays:
            self._arrays.move_to_end(key)
            return True
        if array.nbytes > self.limit_bytes:
            return False
        while self.bytes + array.nbytes > self.limit_bytes:
            evicted, old = self._arrays.popitem(last=False)
            self.bytes -= old.nbytes
            self._written.discard(evicted)
        self._arrays[key] = array
        self.bytes += array.nbytes
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the stored ones of a prefix's `keys` the most recently used, the first key the most recent of all."""
        for key in reversed(keys):
            if key in self._arrays:
                self._arrays.move_to_end(key)

    def mark_written(self, key: bytes) -> None:
        """Record, as long as `key` is in this tier, that its block is in the KV store or queued for it."""
        if key in self._arrays:
            self._written.add(key)

    def unmark_written(self, keys: Iterable[bytes]) -> None:
        """Undo `mark_written` for `keys`."""
        self._written.difference_update(keys)

    def is_written(self, key: bytes) -> bool:
        """Return True if `key` is in this tier and its block is in the KV store or queued for it."""
        return key in self._written

    def clear(self) -> None:
        """Evict everything."""
        self._arrays.clear()
        self._written.clear()
        self.bytes = 0
