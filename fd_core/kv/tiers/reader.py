"""Questions to the store and values from it, on the one thread that reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from fd_core.kv.block_format import BlockFormat
from fd_core.kv.effects import Load
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.envelope import HEADER_BYTES, Damaged, Envelope
from fd_core.kv.tiers.host import HostArray
from fd_core.kv.tiers.line import StoreLine
from fd_core.kv.tiers.operations import Operation, Operations
from fd_core.kv.tiers.rates import Rate
from fd_core.kv.tiers.stats import Counters
from fd_core.kv.tiers.worker import Worker

__all__ = ["StoreReader"]

Deliver = Callable[[Operation, "list[tuple[int, HostArray]]", "int | None"], None]
"""Takes values by index of their key and, if the prefix ends there, the index where it does. Any thread."""


class StoreReader:
    """Asks the store and fetches from it. Jobs are posted by any thread and done in order on the thread of its own.

    A load is fetched batch by batch; whoever took a batch asks for the next, so that the values of one load that wait
    to be copied are bounded and loads take turns.
    """

    def __init__(
        self,
        store: KVStore,
        envelope: Envelope,
        block: BlockFormat,
        line: StoreLine,
        operations: Operations,
        counters: Counters,
        *,
        ask_seconds: float,
        fetch_seconds: float,
        forget: Callable[[bytes], None],
        clock: Callable[[], float],
    ) -> None:
        """`forget` is told the key of each damaged value."""
        self.worker = Worker("fdcore-kv-reader")
        self.block_rate = Rate()
        self.latency = Rate()
        self._store = store
        self._envelope = envelope
        self._block = block
        self._line = line
        self._operations = operations
        self._counters = counters
        self._ask_seconds = ask_seconds
        self._fetch_seconds = fetch_seconds
        self._forget = forget
        self._clock = clock
        self._limit = block.bytes + HEADER_BYTES

    def ready(self) -> bool:
        """Whether the store would be asked at once."""
        return self._line.ready()

    def look_up(self, operation: Operation, missing: Sequence[int]) -> None:
        """Finish a lookup whose keys at the ascending indices `missing` are not in the host tier."""
        self.worker.post(partial(self._look_up, operation, missing))

    def fetch(self, operation: Operation, deliver: Deliver) -> None:
        """Fetch the load's next batch of missing keys, if there is one, and deliver it."""
        self.worker.post(partial(self._fetch, operation, deliver))

    def _look_up(self, operation: Operation, missing: Sequence[int]) -> None:
        if operation.done:
            return
        keys = operation.effect.keys
        wanted = [keys[index] for index in missing]
        began = self._clock()
        found = self._line.call("longest_prefix", self._ask_seconds, lambda timeout: self._ask(wanted, timeout))
        if found is not None:
            self.latency.add(self._clock() - began, 1, self._clock())
            operation.total = missing[found] if found < len(missing) else len(keys)
        if self._operations.finish(operation) and operation.total > operation.host:
            self._counters.add("store_hit_blocks", operation.total - operation.host)

    def _ask(self, keys: Sequence[bytes], timeout: float) -> int:
        found = self._store.longest_prefix(keys, self._limit, timeout)
        if not isinstance(found, int) or not 0 <= found <= len(keys):
            raise ValueError("longest_prefix returned no number of keys")
        return found

    def _fetch(self, operation: Operation, deliver: Deliver) -> None:
        assert isinstance(operation.effect, Load)  # noqa: S101 - for the type checker: only loads are fetched
        keys = operation.effect.keys
        count = min(self._block.batch, len(operation.missing))
        batch = [operation.missing.popleft() for _ in range(count)]
        if operation.done or not batch:
            return
        began = self._clock()
        values = self._line.call(
            "get", self._fetch_seconds, lambda timeout: self._get([keys[i] for i in batch], timeout)
        )
        arrays: list[tuple[int, HostArray]] = []
        for index, value in zip(batch, values or (), strict=False):
            array = None if value is None else self._open(keys[index], value)
            if array is None:
                break
            arrays.append((index, array))
        self.block_rate.add(self._clock() - began, len(arrays), self._clock())
        end = None if len(arrays) == len(batch) else batch[len(arrays)]
        if end is not None:
            operation.missing.clear()
        deliver(operation, arrays, end)

    def _get(self, keys: Sequence[bytes], timeout: float) -> list[memoryview | None]:
        values = self._store.get(keys, self._limit, timeout)
        if len(values) != len(keys):
            raise ValueError("get returned another number of values")
        return [None if value is None else memoryview(value).cast("B") for value in values]

    def _open(self, key: bytes, value: memoryview) -> HostArray | None:
        try:
            return self._block.array(self._envelope.open(key, value, self._block.bytes))
        except Damaged as damaged:
            self._counters.add_damaged(damaged.reason)
            self._forget(key)
            return None
