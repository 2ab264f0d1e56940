"""A correct store that differs from those of the core."""

from __future__ import annotations

import zlib
from dataclasses import replace

from fd_core.errors import ConfigError
from fd_core.kv.stores.contract import Deadline
from fd_core.kv.stores.memory import MemoryStore
from tests.kv.stores.test_memory import MemoryDoor


class CompressingStore(MemoryStore):
    """Compresses values: the limit and the statistics are of the bytes that they take. Locations may have a `level`."""

    def __init__(self, location):
        level = location.parameters.get("level", "1")
        if level not in "1 2 3 4 5 6 7 8 9".split():
            raise ConfigError(f"{location.shown} has level={level}", field="--kv-store", hint="use 1 to 9")
        others = {name: value for name, value in location.parameters.items() if name != "level"}
        super().__init__(replace(location, parameters=others))
        self._level = int(level)

    def get(self, keys, limit, timeout):
        found = [None if value is None else zlib.decompress(value) for value in super().get(keys, 1 << 62, timeout)]
        return [None if value is None or len(value) > limit else value for value in found]

    def put(self, values, timeout):
        deadline, stored = Deadline(timeout), 0
        for key, parts in values:
            deadline.check()
            stored += super().put([(key, [zlib.compress(b"".join(parts), self._level)])], timeout)
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
