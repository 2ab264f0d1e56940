"""Copies between device blocks and the host tier, on the one thread that owns the host tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from fd_core.effects.operations import Found, Load, Loaded, Lookup, NotStored, Save, Saved
from fd_core.effects.pending import PendingOperations
from fd_core.effects.port import OnceLogger
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.tiers.host import HostArray, HostTier
from fd_core.kv.tiers.rates import Rate
from fd_core.kv.tiers.reader import LoadJob, StoreReader
from fd_core.kv.tiers.stats import TierStats
from fd_core.kv.tiers.writer import WriteBehind
from fd_core.ops.contract import KVCache


@dataclass
class Copier:
    """Performs saves, and the host tier's part of loads and lookups, as jobs of `loop`, in their order.

    Blocks are copied one by one: each host array is then separate memory, freed with its block, and an operation that
    ends early waits for one block at most.
    """

    loop: ThreadLoop
    _cache: KVCache
    _block: BlockFormat
    _host: HostTier
    _reader: StoreReader
    _writer: WriteBehind
    _pending: PendingOperations[Found | Loaded | Saved]
    _stats: TierStats
    _logger: OnceLogger
    _clock: Callable[[], float]
    _notify: Callable[[NotStored], None]
    """Called with the keys of blocks that may not have been written to the store."""
    import_rate: Rate = field(default_factory=Rate)

    def __post_init__(self) -> None:
        self._room = self._host.limit_bytes // self._block.bytes
        """Blocks that fit into the host tier; of a longer prefix, it holds the beginning."""

    def lost(self, keys: Sequence[bytes]) -> None:
        """Report that the blocks of `keys` may not have been written to the store. Thread-safe."""
        self.loop.post(partial(self._host.unmark_written, keys))
        self._notify(NotStored(tuple(keys)))

    def look_up(self, lookup: Lookup) -> None:
        """Look up keys in the host tier, and the rest in the store."""
        keys = lookup.keys
        missing = [index for index, key in enumerate(keys) if key not in self._host]
        host = missing[0] if missing else len(keys)
        found = Found(lookup.operation, host, host)
        if not self._pending.advance(found):
            return
        self._host.touch(keys[:host])
        self._stats.host_hit_blocks += host
        if missing and self._reader.store.ready():
            self._reader.loop.post(partial(self._reader.look_up, lookup, host, missing))
        else:
            self._pending.finish(found)

    def save(self, save: Save) -> None:
        """Copy blocks to the host tier, and queue them to be written to the store."""
        self._host.touch(save.keys[: self._room])
        dropped: list[bytes] = []
        for index, key in enumerate(save.keys):
            keep = index < self._room
            write = save.persist and not self._host.is_written(key)
            if write and not self._writer.accepts(self._block.bytes):
                dropped.append(key)
                write = False
            saved = Saved(save.operation, index + 1, min(index + 1, self._room))
            array = self._host.get(key)
            if array is not None:
                if not self._pending.advance(saved):
                    break
            elif not (keep or write) or not self._pending.begin_copy(save.operation):
                break
            else:
                copied = None
                try:
                    exported = self._cache.export_blocks(save.blocks[index : index + 1])
                    array = np.ascontiguousarray(exported).reshape(self._block.shape)
                    array.flags.writeable = False
                    copied = saved
                except Exception as error:  # noqa: BLE001 - a backend's cache: what it cannot copy is not saved
                    self._copy_failed("export_blocks", error)
                    break
                finally:
                    self._pending.end_copy(save.operation, copied)
                self._stats.saved_blocks += 1
            if keep:
                self._host.put(key, array)
            if write:
                if self._writer.offer(key, array):
                    self._host.mark_written(key)
                else:
                    dropped.append(key)
        self._host.touch(save.keys[: self._room])
        if dropped:
            self._writer.drop(len(dropped))
            self._notify(NotStored(tuple(dropped)))
        self._pending.end(save.operation)

    def load(self, load: Load, began: float) -> None:
        """Copy blocks to the device; `began` is in seconds of the clock."""
        keys = load.keys
        if load.operation not in self._pending:
            return
        arrays = [self._host.get(key) for key in keys]
        job = LoadJob(load, began, arrays, end=len(keys), answer=Loaded(load.operation, 0))
        missing = [index for index, array in enumerate(arrays) if array is None]
        self._host.touch(keys)
        if missing and self._reader.store.ready():
            job.missing.extend(missing)
            for _ in range(2):  # one batch is copied while the next is fetched
                self._reader.loop.post(partial(self._reader.fetch, job, self._deliver))
        elif missing:
            job.end = missing[0]
        self._advance(job)

    def _deliver(self, job: LoadJob, arrays: list[tuple[int, HostArray]], end: int | None) -> None:
        self.loop.post(partial(self._take, job, arrays, end))

    def _take(self, job: LoadJob, arrays: list[tuple[int, HostArray]], end: int | None) -> None:
        keys = job.effect.keys
        for index, array in arrays:
            if index < self._room and self._host.put(keys[index], array):
                self._host.mark_written(keys[index])
        if job.effect.operation not in self._pending:
            return
        for index, array in arrays:
            job.arrays[index] = array
            job.fetched.add(index)
        if end is not None:
            job.end = end
        else:
            self._reader.loop.post(partial(self._reader.fetch, job, self._deliver))
        self._advance(job)

    def _advance(self, job: LoadJob) -> None:
        """Copy the blocks of the prefix that are on the host; end the load if no more will arrive."""
        while (index := job.answer.blocks) < job.end:
            array = job.arrays[index]
            if array is None:
                return  # the reader fetches it
            job.arrays[index] = None
            if not self._import(job, index, array):
                job.end = index
        job.arrays = []
        self._host.touch(job.effect.keys[: self._room])
        self._pending.end(job.effect.operation)

    def _import(self, job: LoadJob, index: int, array: HostArray) -> bool:
        if not self._pending.begin_copy(job.effect.operation):
            return False
        stored = index in job.fetched
        from_host = job.answer.from_host + (not stored)
        began = self._clock()
        try:
            self._cache.import_blocks(job.effect.blocks[index : index + 1], array[None])
            ended = self._clock()
            seconds = max(0.0, ended - job.began)
            job.answer = msgspec.structs.replace(job.answer, blocks=index + 1, from_host=from_host, seconds=seconds)
        except Exception as error:  # noqa: BLE001 - a backend's cache: the prefix ends before what it cannot copy
            self._copy_failed("import_blocks", error)
            return False
        finally:
            self._pending.end_copy(job.effect.operation, job.answer)
        self.import_rate.add(ended - began, 1, ended)
        self._stats.loaded_blocks_store += stored
        self._stats.loaded_blocks_host += not stored
        return True

    def _copy_failed(self, what: str, error: Exception) -> None:
        self._stats.copy_errors += 1
        kind = f"{what}: {type(error).__name__}"
        self._logger.warn(f"the KV cache failed in {kind}; blocks that cannot be copied are computed again")
