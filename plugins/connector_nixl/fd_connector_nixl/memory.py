"""Pages that other processes write values to.

A write that arrives when its pages are unmapped ends the process. So pages are never returned to the system: a process
keeps what it once took, and uses it again.
"""

from __future__ import annotations

import mmap
import threading
from typing import Final

import numpy as np
from fd_core.disagg.connectors.contract import ConnectorError

_GRAIN: Final = 1 << 16
_LARGEST: Final = 2
"""A slab may be this many times as large as the lease that gets it, and no larger."""


class Slab:
    """Pages for one lease at a time."""

    def __init__(self, size: int) -> None:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = size
        self.bytes = memoryview(pages)
        """uint8[size]"""
        self.start = int(np.frombuffer(self.bytes, np.uint8).ctypes.data)
        """Address of the first byte in this process."""


class Memory:
    """The slabs of a process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Slab] = []
        self._free: list[Slab] = []

    @property
    def taken(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.size for slab in self._all)

    def lend(self, size: int, limit: int) -> Slab:
        """Return a slab of at least `size` bytes. Raises `ConnectorError` if that takes more than `limit` in all."""
        size = -(-size // _GRAIN) * _GRAIN
        with self._lock:
            if (slab := fitting(self._free, size)) is not None:
                self._free.remove(slab)
                return slab
            if self.taken + size > limit:
                raise ConnectorError(
                    f"a lease needs {size:,} bytes for NIXL, and {self.taken:,} of {limit:,} are taken",
                    hint="raise FD_NIXL_MEMORY_MB, or run fewer requests at once",
                )
            try:
                slab = Slab(size)
            except (OSError, ValueError, OverflowError) as error:
                raise ConnectorError(f"no memory of {size:,} bytes for NIXL: {error}") from error
            self._all.append(slab)
            return slab

    def give_back(self, slab: Slab) -> None:
        """Let the next lease have a slab that nobody can write to any more."""
        with self._lock:
            self._free.append(slab)


def fitting(slabs: list[Slab], size: int) -> Slab | None:
    """Return the smallest slab that `size` bytes fit in without wasting most of it."""
    fit = (slab for slab in slabs if size <= slab.size <= _LARGEST * max(size, _GRAIN))
    return min(fit, key=lambda slab: slab.size, default=None)


MEMORY: Final = Memory()
"""The slabs of this process."""
