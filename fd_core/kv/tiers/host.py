"""The host tier: KV blocks in this process's memory, the least recently used forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

__all__ = ["HostTier"]

HostArray = npt.NDArray[Any]


class HostTier:
    """Read-only arrays by block key, at most `limit_bytes` of them. Owned by one thread; counting only, no copies.

    A prefix is worth nothing without its first block, so whoever keeps one calls `touch` with its keys in order: the
    last block is then forgotten first.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._arrays: OrderedDict[bytes, HostArray] = OrderedDict()
        self._stored: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._arrays)

    def __contains__(self, key: bytes) -> bool:
        return key in self._arrays

    def get(self, key: bytes) -> HostArray | None:
        """Return the array of `key` or None; does not count as a use."""
        return self._arrays.get(key)

    def put(self, key: bytes, array: HostArray) -> bool:
        """Keep `array` as the most recently used; return whether `key` is held now.

        An array that is larger than the whole tier is not kept; one that is held already stays.
        """
        if key in self._arrays:
            self._arrays.move_to_end(key)
            return True
        if array.nbytes > self.limit_bytes:
            return False
        while self.bytes + array.nbytes > self.limit_bytes:
            forgotten, old = self._arrays.popitem(last=False)
            self.bytes -= old.nbytes
            self._stored.discard(forgotten)
        self._arrays[key] = array
        self.bytes += array.nbytes
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the held ones of a prefix's `keys` the most recently used, the first key the most of all."""
        for key in reversed(keys):
            if key in self._arrays:
                self._arrays.move_to_end(key)

    def mark_stored(self, key: bytes) -> None:
        """Remember, as long as `key` is held, that the store has it or is about to get it."""
        if key in self._arrays:
            self._stored.add(key)

    def unmark_stored(self, keys: Iterable[bytes]) -> None:
        """Forget that `mark_stored` was called for `keys`."""
        self._stored.difference_update(keys)

    def is_stored(self, key: bytes) -> bool:
        """Whether `mark_stored` was called for a key that is still held, and not taken back."""
        return key in self._stored

    def clear(self) -> None:
        """Forget everything."""
        self._arrays.clear()
        self._stored.clear()
        self.bytes = 0
