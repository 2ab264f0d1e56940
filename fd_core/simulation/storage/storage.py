"""KV outside the device under the virtual clock: production's tiers, over copies and a store that take made-up time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.effects.port import CompletionQueue
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.tiers.offload import PENDING_BYTES, KVOffload, SealedStore
from fd_core.ops.contract import KVCache
from fd_core.simulation.clock.virtual_loop import VirtualCompletions, VirtualThreads
from fd_core.simulation.costs.contract import Costs
from fd_core.simulation.storage.kv_content import BlankKVCache
from fd_core.simulation.storage.shared_store import SharedStore
from fd_core.types import IntArray

__all__ = ["SECRET", "TimedKVCache", "drawer", "simulated_storage"]

SECRET: Final = bytes(range(32))
"""Every simulated worker's: nobody outside sees anything that is sealed with it."""


class TimedKVCache(KVCache):
    """A cache whose copies take time of the job that makes them; what the blocks hold is another cache's business.

    Blocks are written when the copy is over, and a block that changes while it is read ends the run, so that whoever
    gives a block away too early is found out.
    """

    def __init__(self, cache: KVCache, threads: VirtualThreads, costs: Costs) -> None:
        self.shape = cache.shape
        self.num_blocks = cache.num_blocks
        self.block = (
            BlockFormat(np.uint8, (1,)) if isinstance(cache, BlankKVCache) else BlockFormat.of(cache.shape, "float32")
        )
        """What is exported."""
        self._cache = cache
        self._threads = threads
        self._costs = costs

    def layer(self, index: int) -> Any:
        """Return the handle of one layer."""
        return self._cache.layer(index)

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks to the host."""
        copied = self._cache.export_blocks(blocks)
        self._threads.copy(self._costs.host_copy(len(blocks)))
        if not isinstance(self._cache, BlankKVCache):
            self._threads.tell(lambda: self._require(blocks, copied.tobytes()))
        return copied

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Copy blocks from the host."""
        self._threads.copy(self._costs.host_copy(len(blocks)))
        if not isinstance(self._cache, BlankKVCache):
            self._threads.tell(lambda: self._cache.import_blocks(blocks, data))

    def _require(self, blocks: IntArray, content: bytes) -> None:
        if self._cache.export_blocks(blocks).tobytes() != content:
            raise RuntimeError(f"KV block {blocks.tolist()} was written while it was copied to the host")


def drawer() -> Callable[[int], bytes]:
    """Return what draws bytes for envelopes: a count, so that no two are equal and every run has the same."""
    numbers = itertools.count()
    return lambda count: next(numbers).to_bytes(count, "little")


def simulated_storage(
    threads: VirtualThreads,
    queue: CompletionQueue,
    cache: KVCache,
    costs: Costs,
    *,
    block_bytes: int,
    host_bytes: int,
    store: SharedStore | None = None,
    load_seconds: float = 1.0,
    pending_bytes: int = PENDING_BYTES,
) -> KVOffload:
    """Return the tiers of one worker, see `KVOffload`. `queue` is the engine's.

    `block_bytes`: what a block of the simulated model takes, in which `host_bytes` and `pending_bytes` are counted; the
    blocks of `cache` may be of any size. So the port's own gauges of bytes are those of `cache`.
    """
    timed = TimedKVCache(cache, threads, costs)
    timed.block.batch = BlockFormat.batch_of(block_bytes)
    sealed = None
    if store is not None:
        sealed = SealedStore(store.client(threads, costs), Envelope(SECRET, draw=drawer()))
    return KVOffload(
        VirtualCompletions(threads, queue),
        timed,
        timed.block,
        host_bytes=host_bytes // block_bytes * timed.block.bytes,
        store=sealed,
        load_seconds=load_seconds,
        pending_bytes=pending_bytes // block_bytes * timed.block.bytes,
        clock=threads.clock,
        make_loop=threads.make_loop,
    )
