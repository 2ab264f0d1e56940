"""A correct store that differs from those of the core."""

from __future__ import annotations

import zlib

from fd_core.kv.stores.contract import Deadline
from fd_core.kv.stores.memory import MemoryStore
from tests.kv.stores.test_memory import MemoryDoor


class CompressingStore(MemoryStore):
    """Compresses values: the limit and the statistics are of the bytes that they take."""

    def get(self, keys, limit, timeout):
        found = [None if value is None else zlib.decompress(value) for value in super().get(keys, 1 << 62, timeout)]
        return [None if value is None or len(value) > limit else value for value in found]

    def put(self, values, timeout):
        deadline, stored = Deadline(timeout), 0
        for key, parts in values:
            deadline.check()
            stored += super().put([(key, [zlib.compress(b"".join(parts), 1)])], timeout)
        return stored

    def longest_prefix(self, keys, limit, timeout):
        with self._lock:
            there = self._opened()
            fits = [key in there and len(zlib.decompress(there[key])) <= limit for key in keys]
        return [*fits, False].index(False)


class CompressedDoor(MemoryDoor):
    def read(self, key):
        value = super().read(key)
        return None if value is None else zlib.decompress(value)

    def write(self, key, value):
        super().write(key, zlib.compress(value, 1))
