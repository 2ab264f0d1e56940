"""Lookups in the store and values from it, on the one thread that reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from fd_core.effects.operations import Found, Load, Loaded, Lookup, Saved
from fd_core.effects.pending import PendingOperations
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.envelope import HEADER_BYTES, Damaged, Envelope
from fd_core.kv.tiers.guarded_store import GuardedStore
from fd_core.kv.tiers.host import HostArray
from fd_core.kv.tiers.rates import Rate
from fd_core.kv.tiers.stats import TierStats
from fd_core.types.metrics import one_more


class LoadJob(msgspec.Struct, eq=False):
    """Progress of a load. Owned by the copying thread, except `missing`, which the reading thread owns."""

    effect: Load
    began: float
    arrays: list[HostArray | None]
    """By index of their key: the blocks on the host that are still to be copied, None for those in flight."""
    end: int
    """Blocks that may still be loaded: the prefix ends before the first that is missing, damaged or not copied."""
    answer: Loaded
    """The completion, if the load were to end here."""
    missing: deque[int] = msgspec.field(default_factory=deque)
    """Indices of the keys yet to be fetched from the store, ascending."""
    fetched: set[int] = set()
    """Indices of the keys whose blocks were read from the store."""


Deliver = Callable[[LoadJob, list[tuple[int, HostArray]], int | None], None]
"""Receives blocks by index of their key and, if the prefix ends among them, the index where it does. Thread-safe."""


@dataclass
class StoreReader:
    """Reads the store. Lookups and fetches are jobs of `loop`, posted by any thread and done in order.

    A load is fetched batch by batch; the consumer of a batch requests the next, so that the values of one load waiting
    to be copied are bounded and loads take turns.
    """

    loop: ThreadLoop
    store: GuardedStore
    _envelope: Envelope
    _block: BlockFormat
    _pending: PendingOperations[Found | Loaded | Saved]
    _stats: TierStats
    lookup_seconds: float
    """Bounds one call, as `fetch_seconds` does."""
    fetch_seconds: float
    forget: Callable[[bytes], None]
    """Called with the key of each damaged value."""
    clock: Callable[[], float]
    block_rate: Rate = field(default_factory=Rate)
    latency: Rate = field(default_factory=Rate)

    def __post_init__(self) -> None:
        self._limit = self._block.bytes + HEADER_BYTES

    def look_up(self, lookup: Lookup, host: int, missing: Sequence[int]) -> None:
        """Complete a lookup: the host tier has the leading `host` keys and all but those at the indices `missing`."""
        if lookup.operation not in self._pending:
            return
        keys = lookup.keys
        wanted = [keys[index] for index in missing]
        began = self.clock()

        def ask(store: KVStore, timeout: float) -> int:
            found = store.longest_prefix(wanted, self._limit, timeout)
            if not isinstance(found, int) or not 0 <= found <= len(wanted):
                raise ValueError("longest_prefix returned an invalid number of keys")
            return found

        found = self.store.call("longest_prefix", self.lookup_seconds, ask)
        total = host
        if found is not None:
            self.latency.add(self.clock() - began, 1, self.clock())
            total = missing[found] if found < len(missing) else len(keys)
        if self._pending.finish(Found(lookup.operation, host, total)):
            self._stats.store_hit_blocks += total - host

    def fetch(self, job: LoadJob, deliver: Deliver) -> None:
        """Fetch a load's next batch of missing keys, if there is one, and deliver it."""
        keys = job.effect.keys
        count = min(self._block.batch, len(job.missing))
        batch = [job.missing.popleft() for _ in range(count)]
        if job.effect.operation not in self._pending or not batch:
            return
        began = self.clock()

        def get(store: KVStore, timeout: float) -> list[memoryview | None]:
            values = store.get([keys[index] for index in batch], self._limit, timeout)
            if len(values) != len(batch):
                raise ValueError("get returned a wrong number of values")
            return [None if value is None else memoryview(value).cast("B") for value in values]

        values = self.store.call("get", self.fetch_seconds, get)
        arrays: list[tuple[int, HostArray]] = []
        for index, value in zip(batch, values or (), strict=False):
            array = None if value is None else self._open(keys[index], value)
            if array is None:
                break
            arrays.append((index, array))
        self.block_rate.add(self.clock() - began, len(arrays), self.clock())
        end = None if len(arrays) == len(batch) else batch[len(arrays)]
        if end is not None:
            job.missing.clear()
        deliver(job, arrays, end)

    def _open(self, key: bytes, value: memoryview) -> HostArray | None:
        try:
            return self._block.array(self._envelope.open(key, value, self._block.bytes))
        except Damaged as damaged:
            self._stats.damaged = one_more(self._stats.damaged, damaged.reason)
            self.forget(key)
            return None
