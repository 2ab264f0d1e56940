"""KV outside the device, as an effect port: host tier and store, and the threads that copy, read and write."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar, NamedTuple

import msgspec

from fd_core.effects.operations import (
    Cancel,
    Effect,
    Found,
    Load,
    Loaded,
    LoadPaceMeasured,
    Lookup,
    Save,
    Saved,
)
from fd_core.effects.pending import PendingOperations
from fd_core.effects.port import CompletionQueue, EffectPort, OnceLogger
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.tiers.copier import Copier
from fd_core.kv.tiers.guarded_store import GuardedStore
from fd_core.kv.tiers.host import HostTier
from fd_core.kv.tiers.reader import StoreReader
from fd_core.kv.tiers.stats import TierStats
from fd_core.kv.tiers.writer import WriteBehind
from fd_core.ops.contract import KVCache
from fd_core.types.metrics import total

log = logging.getLogger(__name__)

PENDING_BYTES = 256 * 2**20
"""KV that may wait to be written to the store."""

_LOOKUP_SHARE = 0.25
"""Share of the time for a load that a lookup may take: a request waits for both."""
_FETCH_SHARE = 0.5
"""Share of the time for a load that one batch of the load may take."""
_JOIN_SECONDS = 0.5
"""Timeout of joining a thread after a stop request."""
_FLUSH_SECONDS = 3.0
"""Time to flush pending writes when the engine ends."""


class SealedStore(NamedTuple):
    """A store that was opened, and the envelope that its values are sealed in."""

    store: KVStore
    envelope: Envelope


class KVOffload(EffectPort[TierStats]):
    """Looks up, loads and saves on three threads: one copies and owns the host tier, two read and write the store.

    The methods belong to the engine's thread and none but `wait` and `close` ever blocks: effects are posted to a
    thread, completions are collected, and the few shared locks are held for some assignments only.

    A `Lookup` is completed within a quarter of `load_seconds`, a `Load` and a `Save` within `load_seconds`, counted
    from `perform`, plus the copy of the one block in progress then. Blocks that were late, failed or damaged are
    simply not part of the completion.
    """

    performs: ClassVar = (Lookup, Load, Save)

    def __init__(
        self,
        queue: CompletionQueue,
        cache: KVCache,
        block: BlockFormat,
        *,
        host_bytes: int,
        store: SealedStore | None = None,
        load_seconds: float = 1.0,
        pending_bytes: int = PENDING_BYTES,
        clock: Callable[[], float] = time.monotonic,
        make_loop: Callable[..., ThreadLoop] = ThreadLoop,
    ) -> None:
        """Start the threads.

        `block` is what the cache exports; `host_bytes` may be 0; `pending_bytes` bounds the blocks that wait to be
        written. `store` was opened before and is closed at the end.
        """
        super().__init__(queue)
        self._block_size = cache.shape.block_size
        self._store = None if store is None else store.store
        self._clock = clock
        self._lookup_seconds = _LOOKUP_SHARE * load_seconds
        self._load_seconds = load_seconds
        self._pending: PendingOperations[Found | Loaded | Saved] = PendingOperations(queue.put)
        self._stats = TierStats()
        logger = OnceLogger()
        self._pace: tuple[float | None, ...] = (None, None, None)
        """Fields of the last `LoadPaceMeasured` sent."""
        self._host = HostTier(host_bytes)
        envelope = Envelope(bytes(32)) if store is None else store.envelope  # without a store it seals nothing
        # Two guards, so that a store that only writes badly is still read.
        self._reads = GuardedStore(self._store, logger, clock)
        self._writes = GuardedStore(self._store, logger, clock)
        self._writer = WriteBehind(
            make_loop("fdcore-kv-writer"),
            self._writes,
            envelope,
            _stats=self._stats,
            _logger=logger,
            limit_bytes=pending_bytes,
            batch=block.batch,
            put_seconds=load_seconds,
            lost=lambda keys: self._copier.lost(keys),
            clock=clock,
        )
        self._reader = StoreReader(
            make_loop("fdcore-kv-reader"),
            self._reads,
            envelope,
            _block=block,
            _pending=self._pending,
            _stats=self._stats,
            lookup_seconds=self._lookup_seconds,
            fetch_seconds=_FETCH_SHARE * load_seconds,
            forget=self._writer.forget,
            clock=clock,
        )
        self._copier = Copier(
            make_loop("fdcore-kv-copy"),
            cache,
            block,
            _host=self._host,
            _reader=self._reader,
            _writer=self._writer,
            _pending=self._pending,
            _stats=self._stats,
            _logger=logger,
            _clock=clock,
            _notify=queue.put,
        )
        self._closed = False
        for loop in self.loops:
            loop.start()

    @property
    def loops(self) -> tuple[ThreadLoop, ...]:
        """The threads: the one that copies and, with a store, those that read and write it."""
        copier = (self._copier.loop,)
        return copier if self._store is None else (*copier, self._reader.loop, self._writer.loop)

    def perform(self, effects: Iterable[Effect]) -> None:
        """Begin the effects that the scheduler requested."""
        now = self._clock()
        for effect in effects:
            answer: Found | Loaded | Saved
            match effect:
                case Lookup(operation, keys):
                    useful = bool(keys) and not self._nothing_to_find()
                    self._stats.lookups += 1
                    answer, seconds = Found(operation, 0, 0), self._lookup_seconds
                    job = partial(self._copier.look_up, effect)
                case Load(operation, keys):
                    useful = bool(keys) and not self._nothing_to_find()
                    self._stats.loads += 1
                    answer, seconds = Loaded(operation, 0), self._load_seconds
                    job = partial(self._copier.load, effect, now)
                case Save(operation, keys):
                    useful = bool(keys) and not self._closed
                    self._stats.saves += 1
                    answer, seconds = Saved(operation, 0), self._load_seconds
                    job = partial(self._copier.save, effect)
                case Cancel(operation):
                    self._pending.end(operation)
                    continue
                case _:
                    continue
            if useful:
                self.idle = False
                self._pending.begin(answer, now + seconds)
                self._copier.loop.post(job)
            else:  # a job is of no use
                self._queue.put(answer)

    def tend(self) -> None:
        """Complete operations that are past their deadline, and publish the pace of loading whenever it changed."""
        now = self._clock()
        for answer in self._pending.expire(now):
            self._stats.lookups_expired += isinstance(answer, Found)
            self._stats.load_expired += isinstance(answer, Loaded)
            self._stats.saves_expired += isinstance(answer, Saved)
        pace = (
            self._copier.import_rate.value(now),
            self._reader.block_rate.value(now),
            self._reader.latency.value(now),
        )
        if pace != self._pace:
            self._pace = pace
            self._queue.put(LoadPaceMeasured(*pace))
        self.idle = not len(self._pending) and pace == (None, None, None)

    def stats(self) -> TierStats:
        """Return counters and gauges."""
        return msgspec.structs.replace(
            self._stats,
            block_size=self._block_size,
            host_blocks=len(self._host),
            host_bytes=self._host.bytes,
            host_limit_bytes=self._host.limit_bytes,
            open_operations=len(self._pending),
            pending_write_bytes=self._writer.pending_bytes,
            store_errors=total([self._reads.errors, self._writes.errors]),
            breaker=self._reads.state,
            write_breaker=self._writes.state,
            store=None if self._store is None else self._store.location.shown,
        )

    def close(self, flush_seconds: float = _FLUSH_SECONDS) -> None:
        """Copy and write for `flush_seconds`, end the threads but those whose call does not return. Idempotent."""
        if self._closed:
            return
        self._closed = True
        until = self._clock() + flush_seconds
        for number in self._pending.numbers(Found, Loaded):
            self._pending.end(number)
        self._reader.loop.stop()
        self._copier.loop.stop()
        ended = self._copier.loop.join(flush_seconds)
        for number in self._pending.numbers():
            self._pending.end(number)
        ended = ended or self._copier.loop.join(_JOIN_SECONDS)
        ended &= self._writer.close(max(0.0, until - self._clock()))
        ended &= self._reader.loop.join(_JOIN_SECONDS)
        if ended:
            self._host.clear()
        else:
            log.warning("a copy or a call of the KV store does not return; its thread is abandoned")
        if self._store is not None:
            self._store.close()

    def _nothing_to_find(self) -> bool:
        """Return True if neither tier can hold a block, so that a lookup needs no thread."""
        if self._closed:
            return True
        return not (len(self._host) or self._reader.store.ready() or self._pending.numbers(Saved))
