"""Copies between device blocks and the host tier, on the one thread that owns the tier."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from fd_core.kv.block_format import BlockFormat
from fd_core.kv.effects import Load, Save
from fd_core.kv.tiers.host import HostArray, HostTier
from fd_core.kv.tiers.operations import Operation, Operations
from fd_core.kv.tiers.rates import Rate
from fd_core.kv.tiers.reader import StoreReader
from fd_core.kv.tiers.stats import Counters
from fd_core.kv.tiers.worker import Worker
from fd_core.kv.tiers.writer import WriteBehind
from fd_core.ops.contract import KVCache
from fd_core.types import IntArray

__all__ = ["Copier"]

log = logging.getLogger(__name__)


class Copier:
    """Performs saves, and what loads and lookups need of the host tier, in the order in which they were posted.

    Blocks are copied one by one: each host array is then a piece of memory of its own, which ends with its block, and
    an operation that ends waits for one block at most.
    """

    def __init__(
        self,
        cache: KVCache,
        block: BlockFormat,
        host: HostTier,
        reader: StoreReader | None,
        writer: WriteBehind | None,
        operations: Operations,
        counters: Counters,
        clock: Callable[[], float],
        unwritten: deque[bytes],
    ) -> None:
        """`unwritten` receives the keys of blocks that were to be written and are not."""
        self.worker = Worker("fdcore-kv-copy")
        self.import_rate = Rate()
        self._cache = cache
        self._block = block
        self._host = host
        self._reader = reader
        self._writer = writer
        self._operations = operations
        self._counters = counters
        self._clock = clock
        self._unwritten = unwritten
        self._room = host.limit_bytes // block.bytes
        """Blocks that fit into the host tier; a longer prefix keeps its beginning there."""
        self._logged: set[str] = set()

    def look_up(self, operation: Operation) -> None:
        """Post a lookup."""
        self.worker.post(partial(self._look_up, operation))

    def save(self, operation: Operation) -> None:
        """Post a save."""
        self.worker.post(partial(self._save, operation))

    def load(self, operation: Operation) -> None:
        """Post a load."""
        self.worker.post(partial(self._load, operation))

    def lost(self, keys: Sequence[bytes]) -> None:
        """Post that the store may not have got the blocks of `keys` after all. Any thread."""
        self._unwritten.extend(keys)
        self.worker.post(partial(self._host.unmark_stored, keys))

    def _look_up(self, operation: Operation) -> None:
        if operation.done:
            return
        keys = operation.effect.keys
        missing = [index for index, key in enumerate(keys) if key not in self._host]
        host = missing[0] if missing else len(keys)
        operation.host = host
        self._host.touch(keys[:host])
        self._counters.add("host_hit_blocks", host)
        if missing and self._reader is not None and self._reader.ready():
            self._reader.look_up(operation, missing)
        else:
            self._operations.finish(operation)

    # Saving -----------------------------------------------------------------------------------------------

    def _save(self, operation: Operation) -> None:
        effect = operation.effect
        assert isinstance(effect, Save)  # noqa: S101 - for the type checker
        self._host.touch(effect.keys[: self._room])
        for index, key in enumerate(effect.keys):
            keep = index < self._room
            write = self._writer is not None and effect.persist and not self._host.is_stored(key)
            if write and not (self._writer and self._writer.accepts(self._block.bytes)):
                self._drop(key)
                write = False
            array = self._host.get(key)
            if array is not None:
                if not self._operations.skip_copy(operation):
                    break
            elif not (keep or write) or (array := self._export(operation, effect.blocks[index : index + 1])) is None:
                break
            if keep:
                self._host.put(key, array)
            if write and self._writer:
                if self._writer.offer(key, array):
                    self._host.mark_stored(key)
                else:
                    self._drop(key)
        self._host.touch(effect.keys[: self._room])
        self._operations.finish(operation)

    def _drop(self, key: bytes) -> None:
        self._counters.add("dropped_blocks")
        self._unwritten.append(key)

    def _export(self, operation: Operation, block: IntArray) -> HostArray | None:
        if not self._operations.begin_copy(operation):
            return None
        array = None
        try:
            array = np.ascontiguousarray(self._cache.export_blocks(block)).reshape(self._block.shape)
            array.flags.writeable = False
        except Exception as error:  # noqa: BLE001 - a backend's cache: what it cannot copy is not saved
            self._copy_failed("export_blocks", error)
        finally:
            self._operations.end_copy(operation, whole=array is not None)
        if array is not None:
            self._counters.add("saved_blocks")
        return array

    # Loading ----------------------------------------------------------------------------------------------

    def _load(self, operation: Operation) -> None:
        if operation.done:
            return
        keys = operation.effect.keys
        operation.arrays = [self._host.get(key) for key in keys]
        operation.end = len(keys)
        missing = [index for index, array in enumerate(operation.arrays) if array is None]
        self._host.touch(keys)
        if missing and self._reader is not None and self._reader.ready():
            operation.missing.extend(missing)
            for _ in range(2):  # one batch is copied while the next is fetched
                self._reader.fetch(operation, self._deliver)
        elif missing:
            operation.end = missing[0]
        self._advance(operation)

    def _deliver(self, operation: Operation, arrays: list[tuple[int, HostArray]], end: int | None) -> None:
        self.worker.post(partial(self._take, operation, arrays, end))

    def _take(self, operation: Operation, arrays: list[tuple[int, HostArray]], end: int | None) -> None:
        keys = operation.effect.keys
        for index, array in arrays:
            if index < self._room and self._host.put(keys[index], array):
                self._host.mark_stored(keys[index])
        if operation.done:
            return
        for index, array in arrays:
            operation.arrays[index] = array
            operation.fetched.add(index)
        if end is not None:
            operation.end = end
        elif self._reader is not None:
            self._reader.fetch(operation, self._deliver)
        self._advance(operation)

    def _advance(self, operation: Operation) -> None:
        """Copy what is at hand of the prefix; finish the load if that was all."""
        while (index := operation.blocks) < operation.end:
            array = operation.arrays[index]
            if array is None:
                return  # it is being fetched
            operation.arrays[index] = None
            if not self._import(operation, index, array):
                operation.end = index
        operation.arrays = []
        self._host.touch(operation.effect.keys[: self._room])
        self._operations.finish(operation)

    def _import(self, operation: Operation, index: int, array: HostArray) -> bool:
        effect = operation.effect
        assert isinstance(effect, Load)  # noqa: S101 - for the type checker
        if not self._operations.begin_copy(operation):
            return False
        whole = False
        stored = index in operation.fetched
        began = self._clock()
        try:
            self._cache.import_blocks(effect.blocks[index : index + 1], array[None])
            whole = True
        except Exception as error:  # noqa: BLE001 - a backend's cache: the prefix ends before what it cannot copy
            self._copy_failed("import_blocks", error)
        finally:
            self._operations.end_copy(operation, whole=whole, from_host=not stored)
        if whole:
            ended = self._clock()
            self.import_rate.add(ended - began, 1, ended)
            self._counters.add("loaded_blocks_store" if stored else "loaded_blocks_host")
        return whole

    def _copy_failed(self, what: str, error: Exception) -> None:
        self._counters.add("copy_errors")
        kind = f"{what}: {type(error).__name__}"
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("the KV cache failed in %s; such blocks are computed again", kind)
