"""A KV cache whose blocks several threads may copy."""

from __future__ import annotations

import threading
from typing import Any

import numpy.typing as npt

from fd_core.ops.contract import KVCache
from fd_core.types import IntArray

__all__ = ["LockedKVCache"]


class LockedKVCache(KVCache):
    """Lets several threads copy blocks of one cache, which bears only one copy at a time."""

    def __init__(self, cache: KVCache) -> None:
        self.shape = cache.shape
        self.num_blocks = cache.num_blocks
        self.spare_block = cache.spare_block
        self._cache = cache
        self._lock = threading.Lock()

    def layer(self, index: int) -> Any:
        """Return the pack's handle of one layer."""
        return self._cache.layer(index)

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks to the host, see `KVCache.export_blocks`."""
        with self._lock:
            return self._cache.export_blocks(blocks)

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Write blocks from the host, see `KVCache.import_blocks`."""
        with self._lock:
            self._cache.import_blocks(blocks, data)
