"""KV outside the device, as the engine sees it: effects in, completions out, and nothing that waits."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from fd_core.kv.block_format import BlockFormat
from fd_core.kv.effects import Cancel, Completion, Effect, Found, Load, Loaded, Lookup, Save, Saved
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.tiers.copier import Copier
from fd_core.kv.tiers.host import HostTier
from fd_core.kv.tiers.line import StoreLine
from fd_core.kv.tiers.operations import Operations
from fd_core.kv.tiers.rates import LoadRates
from fd_core.kv.tiers.reader import StoreReader
from fd_core.kv.tiers.stats import Counters, TierStats
from fd_core.kv.tiers.writer import WriteBehind
from fd_core.ops.contract import KVCache

__all__ = ["KVTiers"]

log = logging.getLogger(__name__)

_LOOKUP_SHARE = 0.25
"""Of the time for a load, what a lookup may take: a request waits for both."""
_FETCH_SHARE = 0.5
"""Of the time for a load, what one batch of it may take."""
_JOIN_SECONDS = 0.5
"""For a thread to end its job when it was told to."""


class KVTiers:
    """Performs effects on three threads: one copies and owns the host tier, one reads the store, one writes it.

    The methods belong to the engine's thread and none but `wait` and `close` ever blocks: effects are posted to a
    thread, completions are collected, and the few locks that both sides take are held for some assignments only.

    Every effect but `Cancel` gets one completion: a `Lookup` within a quarter of `load_seconds`, a `Load` and a `Save`
    within `load_seconds`, counted from `perform`, plus the copy of the one block that is under way then. What came too
    late, failed or was damaged is simply not part of the answer.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        dtype: str,
        host_bytes: int,
        store: KVStore | None = None,
        envelope: Envelope | None = None,
        load_seconds: float = 1.0,
        pending_bytes: int = 256 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        `dtype` is that of the cache, `float32` or `bfloat16`; `host_bytes` may be 0; `pending_bytes` bounds what waits
        to be written. The store stays the caller's: it was opened before and is closed after these tiers.
        """
        block = BlockFormat.of(cache.shape, dtype)
        if (store is None) != (envelope is None):
            raise ValueError("store and envelope go together")
        self._clock = clock
        self._lookup_seconds = _LOOKUP_SHARE * load_seconds
        self._load_seconds = load_seconds
        self._operations = Operations(clock)
        self._counters = Counters()
        self._block_size = cache.shape.block_size
        self._host = HostTier(host_bytes)
        self._store = None if store is None else store.location.shown
        self._unwritten: deque[bytes] = deque()
        self._reader: StoreReader | None = None
        self._writer: WriteBehind | None = None
        if store is not None and envelope is not None:
            self._read_line, self._write_line = (StoreLine(store.location.shown, self._counters, clock) for _ in "rw")
            self._writer = WriteBehind(
                store,
                envelope,
                self._write_line,
                self._counters,
                limit_bytes=pending_bytes,
                batch=block.batch,
                put_seconds=load_seconds,
                lost=lambda keys: self._copier.lost(keys),
            )
            self._reader = StoreReader(
                store,
                envelope,
                block,
                self._read_line,
                self._operations,
                self._counters,
                ask_seconds=self._lookup_seconds,
                fetch_seconds=_FETCH_SHARE * load_seconds,
                forget=self._writer.forget,
                clock=clock,
            )
        self._copier = Copier(
            cache,
            block,
            self._host,
            self._reader,
            self._writer,
            self._operations,
            self._counters,
            clock,
            self._unwritten,
        )
        self._closed = False
        for part in (self._copier, self._reader, self._writer):
            if part is not None:
                part.worker.start()

    # The engine's loop ------------------------------------------------------------------------------------

    def perform(self, effects: Iterable[Effect]) -> None:
        """Begin what the scheduler wants done."""
        for effect in effects:
            match effect:
                case Lookup(operation, keys):
                    self._counters.add("lookups")
                    if not keys or self._nothing_to_find():
                        self._operations.answer(Found(operation, 0, 0))
                    else:
                        self._copier.look_up(self._operations.begin(effect, self._lookup_seconds))
                case Load(operation, keys):
                    self._counters.add("loads")
                    if not keys or self._nothing_to_find():
                        self._operations.answer(Loaded(operation, 0))
                    else:
                        self._copier.load(self._operations.begin(effect, self._load_seconds))
                case Save(operation, keys):
                    self._counters.add("saves")
                    if not keys or self._closed:
                        self._operations.answer(Saved(operation, 0))
                    else:
                        self._copier.save(self._operations.begin(effect, self._load_seconds))
                case Cancel(operation):
                    self._operations.cancel(operation)

    def completed(self) -> list[Completion]:
        """Return the completions since the last call, those of operations that are past their deadline included."""
        for operation in self._operations.expire():
            self._counters.add(_EXPIRED[type(operation.effect)])
        return self._operations.collect()

    def unwritten(self) -> list[bytes]:
        """Return keys of blocks that were saved for the store and did not get there, since the last call."""
        if not self._unwritten:
            return []
        return [self._unwritten.popleft() for _ in range(len(self._unwritten))]

    def wait(self, seconds: float) -> None:
        """Wait until `completed` may have something to return, at most `seconds`."""
        self._operations.wait(seconds)

    def rates(self) -> LoadRates:
        """Return what loading costs at present."""
        now = self._clock()
        return LoadRates(
            host_block=self._copier.import_rate.value(now),
            store_block=None if self._reader is None else self._reader.block_rate.value(now),
            store_latency=None if self._reader is None else self._reader.latency.value(now),
        )

    def stats(self) -> TierStats:
        """Return counters and gauges."""
        counted = self._counters.snapshot()
        gauges = msgspec.structs.replace(
            counted,
            block_size=self._block_size,
            host_blocks=len(self._host),
            host_bytes=self._host.bytes,
            host_limit_bytes=self._host.limit_bytes,
            open_operations=len(self._operations),
        )
        if self._writer is None:
            return gauges
        return msgspec.structs.replace(
            gauges,
            pending_write_bytes=self._writer.pending_bytes,
            breaker=self._read_line.state,
            write_breaker=self._write_line.state,
            store=self._store,
        )

    def close(self, flush_seconds: float) -> None:
        """Copy and write what was to be saved for at most `flush_seconds`, answer the rest as it is, end the threads.

        A thread whose call of the store does not return is left behind; it keeps nothing alive but itself. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + flush_seconds
        self._operations.end_all(saves=False)
        if self._reader is not None:
            self._reader.worker.finish()
        self._copier.worker.finish()
        ended = self._copier.worker.join(flush_seconds)
        self._operations.end_all(saves=True)
        ended = ended or self._copier.worker.join(_JOIN_SECONDS)
        if self._writer is not None:
            ended &= self._writer.close(max(0.0, until - time.monotonic()))
        if self._reader is not None:
            ended &= self._reader.worker.join(_JOIN_SECONDS)
        if ended:
            self._host.clear()
        else:
            log.warning("a copy or a call of the KV store does not return; its thread is left behind")

    def _nothing_to_find(self) -> bool:
        """Whether neither tier can have anything, so that a question needs no thread."""
        if self._closed:
            return True
        if self._operations.open_saves or len(self._host):
            return False
        return self._reader is None or not self._reader.ready()


_EXPIRED: dict[type[Effect], str] = {Lookup: "lookups_expired", Load: "load_expired", Save: "saves_expired"}
