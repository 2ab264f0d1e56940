"""How much memory a process and a device have in use, as exactly as their systems say."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Final

import numpy as np

from fd_core.backends.contract import Backend
from fd_core.backends.memory import available_memory
from fd_core.ops.contract import KVCache, KVShape, Ops
from fd_core.ops.weights import ITEM_BYTES

MEBI: Final = 2**20
_PROBED: Final = 384 * MEBI


def resident() -> int:
    """Return bytes of this process that are in memory; 0 where the system does not say."""
    gc.collect()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def live_objects() -> int:
    """Return how many pieces of memory Python's objects take: one more for each object that somebody keeps."""
    gc.collect()
    return sys.getallocatedblocks()


def counts_host_memory(backend: Backend) -> bool:
    """Whether a backend's free memory, or the share that it offers, is the host's: they rise and fall together."""
    seen = []
    for _ in range(3):
        seen.append((backend.free_memory(), available_memory()))
        taken = np.ones(_PROBED // 8)
        seen.append((backend.free_memory(), available_memory()))
        del taken
    ours, host = np.array(seen, np.float64).T
    return bool(ours.std() > 0 and host.std() > 0 and np.corrcoef(ours, host)[0, 1] > 0.9)


def filled_cache(ops: Ops, size: int) -> KVCache:
    """Allocate a cache of about `size` bytes and write all of it."""
    # One layer: a C library keeps what it got for arrays below 32 MiB, and does not return it to the system.
    shape = KVShape(num_layers=1, num_kv_heads=8, head_dim=128, block_size=64)
    blocks = max(size // shape.bytes_per_block(ITEM_BYTES[ops.dtype]), 1)
    cache = ops.allocate_kv(shape, blocks)
    ones = np.ones_like(cache.export_blocks(np.zeros(1, np.int32)))
    for first in range(0, blocks, 16):
        some = np.arange(first, min(first + 16, blocks), dtype=np.int32)
        cache.import_blocks(some, ones.repeat(len(some), axis=0))
    return cache
