"""KV outside the device under the virtual clock: production's tiers, over copies and a store that take made-up time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.effects.port import CompletionQueue
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.contract import Bytes, KVStore, StoreError, StoreStats, Trouble
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.stores.location import parse_location
from fd_core.kv.stores.memory import MemoryStore
from fd_core.kv.tiers.offload import PENDING_BYTES, KVOffload, SealedStore
from fd_core.ops.contract import KVCache, KVShape
from fd_core.simulation.clock.timeline import Timeline
from fd_core.simulation.clock.virtual_loop import VirtualCompletions, VirtualThreads
from fd_core.simulation.costs.profile_costs import Costs
from fd_core.types import IntArray


class BlankKVCache(KVCache):
    """Blocks without content, for worlds in which nobody looks at it: one byte each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size)
        self.num_blocks = num_blocks

    def layer(self, index: int) -> Any:
        """There is nothing to compute with."""
        raise NotImplementedError("blank blocks hold no KV")

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Return zeros, uint8[n, 1]."""
        return np.zeros((len(blocks), 1), np.uint8)

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Do nothing."""


_ANY: Final = 2**62
"""Longer than any value."""


class SharedStore:
    """What the store holds, the same for all workers, and how it is.

    Everything here may be changed at any time. A call that has begun ends as it would have before.
    """

    def __init__(self, timeline: Timeline, max_bytes: int = 2**30, value_seconds: float = 0.0) -> None:
        """`timeline` is the store's own; clocks of workers may show something else.

        `max_bytes` bounds sealed values as they are simulated, not as they would be. `value_seconds` is what the store
        needs for each value, one after the other for all workers together; a worker that has the store for itself waits
        for the longer of that and of its own costs.
        """
        self.values = MemoryStore(parse_location(f"memory:?max_bytes={max_bytes}"))
        self.trouble: Trouble | None = None
        """How calls fail; with `TIMEOUT` each takes as long as it may."""
        self.write_trouble: Trouble | None = None
        """How calls that change something fail, such as `FULL`."""
        self.slowness = 1.0
        """How many times as long calls take."""
        self._timeline = timeline
        self._value_seconds = value_seconds
        self._free = 0.0

    def client(self, threads: VirtualThreads, costs: Costs) -> SharedStoreClient:
        """Return the store as one worker sees it."""
        return SharedStoreClient(self, threads, costs)

    def lose(self, every: int = 1) -> None:
        """Delete every so-many-th value, the least recently used one first."""
        self.values.delete(self.values.keys()[::every], math.inf)

    def damage(self, every: int = 1) -> None:
        """Flip a bit in every so-many-th value."""
        keys = self.values.keys()[::every]
        for key, value in zip(keys, self.values.get(keys, _ANY, math.inf), strict=True):
            if value is not None:
                self.values.put([(key, (bytes(value[:-1]), bytes([value[-1] ^ 1])))], math.inf)

    def serve(self, ahead: float, values: int, seconds: float) -> float:
        """Take a call in that begins `ahead` seconds from now and would take `seconds`; return how long it takes."""
        begin = self._timeline.now + ahead
        self._free = max(self._free, begin) + values * self._value_seconds
        return max(seconds, self._free - begin) * self.slowness


class SharedStoreClient(KVStore):
    """The store contract for one worker: calls take time of the job that makes them."""

    name = "simulated"
    shared = True

    def __init__(self, store: SharedStore, threads: VirtualThreads, costs: Costs) -> None:
        super().__init__(parse_location("simulated:"))
        self._store = store
        self._threads = threads
        self._costs = costs

    def open(self, timeout: float) -> str:
        """Return a line for people."""
        return "a simulated store"

    def get(self, keys: Sequence[bytes], limit: int, timeout: float) -> list[Bytes | None]:
        """Return what is there when the call begins."""
        found = self._store.values.get(keys, limit, timeout)
        self._call(timeout, self._costs.store_read(len(keys)), len(keys))
        return found

    def put(self, values: Sequence[tuple[bytes, Sequence[Bytes]]], timeout: float) -> int:
        """Store values; others find them when the call is over."""
        self._call(timeout, self._costs.store_write(len(values)), len(values), writes=True)
        store = self._store.values
        self._threads.tell(lambda: store.put(values, math.inf))
        return len(values)

    def longest_prefix(self, keys: Sequence[bytes], limit: int, timeout: float) -> int:
        """Count what is there when the call begins."""
        found = self._store.values.longest_prefix(keys, limit, timeout)
        self._call(timeout, self._costs.store_read(0), 0)
        return found

    def delete(self, keys: Sequence[bytes], timeout: float) -> int:
        """Delete values."""
        self._call(timeout, self._costs.store_write(0), 0, writes=True)
        return self._store.values.delete(keys, timeout)

    def stats(self, timeout: float) -> StoreStats:
        """Return exact numbers, at no cost."""
        return self._store.values.stats(timeout)

    def close(self) -> None:
        """Leave the store to the other workers."""

    def _call(self, timeout: float, seconds: float, values: int, *, writes: bool = False) -> None:
        """Let a call take its time. Raises `StoreError` as the schedule has it, or if the time is more than it may."""
        store, threads = self._store, self._threads
        trouble = store.trouble or (store.write_trouble if writes else None)
        taken = timeout if trouble is Trouble.TIMEOUT else store.serve(threads.ahead, values, seconds)
        threads.spend(min(taken, timeout), waits=True)
        if trouble is not None or taken > timeout:
            raise StoreError(trouble or Trouble.TIMEOUT, "the simulated store fails")


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
