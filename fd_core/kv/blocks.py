"""Accounting of KV blocks: every block is free, owned or fenced.

    allocate / acquire            release(fence)               answered(step)
    free ---------------> owned ----------------> fenced ----------------> free
                            \\_______________________________________________^
                              release, if the output of the fence has already arrived

A block is *owned* while its reference count, the number of its owners, is above zero. It is *fenced* when it has no
owner, but a step that may still touch it has no output yet, or an operation outside steps has it *pinned*: a copy to
the host, a load, a transfer to or from another worker. All other blocks are *free*; a free block may hold a cached
prefix until it is evicted, least recently used first.

A block that holds a cached prefix is full and not written again, so an operation that has it pinned only reads it: a
request that matches it may own it at the same time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.types import IntArray
from fd_core.types.kv_events import Recorder
from fd_core.types.metrics import gauge


class BlockStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of a block pool."""

    used: Annotated[int, gauge("kv_blocks_used", "KV blocks owned by requests.")] = 0
    fenced: Annotated[
        int, gauge("kv_blocks_fenced", "KV blocks without owner that a step or a copy in flight still touches.")
    ] = 0
    cached: Annotated[int, gauge("kv_blocks_cached", "Free KV blocks that hold a reusable prefix.")] = 0
    total: Annotated[int, gauge("kv_blocks", "KV blocks of the device.")] = 0

    @property
    def usage(
        self,
    ) -> Annotated[
        float,
        gauge(
            "kv_usage_ratio",
            "Share of KV blocks that are not free, 0 to 1.",
            vllm=("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        ),
    ]:
        """Share of blocks that are not free."""
        return (self.used + self.fenced) / self.total if self.total else 0.0


class BlockPool:
    """Owner of the block numbers 0 to `num_blocks - 1`."""

    def __init__(self, num_blocks: int, recorder: Recorder | None = None) -> None:
        """`recorder` receives the evicted prefixes."""
        self.num_blocks = num_blocks
        self._recorder = recorder
        self._references = np.zeros(num_blocks, np.int32)
        self._fence = np.full(num_blocks, -1, np.int64)
        """Last step scheduled to touch a block, over all owners it had since it was free."""
        self._empty = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        """Stack of free blocks without reusable content; the first `_num_empty` entries are valid."""
        self._num_empty = num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks with reusable content, least recently used first."""
        self._fenced: deque[tuple[int, IntArray]] = deque()
        self._num_fenced = 0
        self._pins = np.zeros(num_blocks, np.int32)
        self._pinned: dict[int, None] = {}
        """Blocks that would be free but for their pins, in the order of their release."""
        self._answered = -1
        self.num_freed = 0
        """Number of times that a block was freed since the start; monotonic."""
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._named = np.zeros(num_blocks, np.bool_)
        """True for the blocks in `_key_of`."""

    def stats(self) -> BlockStats:
        """Return gauges."""
        fenced, cached = self._num_fenced + len(self._pinned), len(self._cached)
        used = self.num_blocks - self._num_empty - cached - fenced
        return BlockStats(used=used, fenced=fenced, cached=cached, total=self.num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that an allocation can take at once."""
        return self._num_empty + len(self._cached)

    @property
    def num_fenced(self) -> int:
        """Blocks that become free when steps and operations in flight complete."""
        return self._num_fenced + len(self._pinned)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a cached prefix."""
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.num_free - self.num_fenced

    def knows(self, key: bytes) -> bool:
        """Return True if any block, even a fenced one, holds the content named by `key`."""
        return key in self._block_of

    def holds(self, block: int, key: bytes) -> bool:
        """Return True if `block` holds the content named by `key`."""
        return self._block_of.get(key) == block

    def find(self, key: bytes) -> int:
        """Return the block that holds the content named by `key` and may be acquired; -1 if there is none."""
        block = self._block_of.get(key, -1)
        if block < 0 or self._references[block] or block in self._cached or block in self._pinned:
            return block
        return -1

    def match(self, keys: Iterable[bytes]) -> IntArray:
        """Return the blocks of the longest cached prefix of the chain `keys`; allocates and evicts nothing.

        A block that is fenced by a step does not match: it gets no owner before that step has an output. One that is
        only pinned does.
        """
        block_of = self._block_of
        found = []
        for key in keys:
            block = block_of.get(key)
            if block is None:
                break
            found.append(block)
        blocks = np.array(found, np.int32)
        for index in np.flatnonzero(self._references[blocks] == 0).tolist():
            if found[index] not in self._cached and found[index] not in self._pinned:
                return blocks[:index]
        return blocks

    def allocate(self, count: int) -> IntArray | None:
        """Take `count` free blocks for one owner, or none at all if fewer are free."""
        if count > self._num_empty + len(self._cached):
            return None
        from_empty = min(count, self._num_empty)
        self._num_empty -= from_empty
        # Ascending, so that a request's blocks are contiguous in memory while the pool is fresh.
        taken = self._empty[self._num_empty : self._num_empty + from_empty][::-1].copy()
        if from_empty < count:
            taken = np.concatenate([taken, self._evict(count - from_empty)])
        self._references[taken] = 1
        taken.setflags(write=False)
        return taken

    def acquire(self, blocks: IntArray) -> None:
        """Add an owner to blocks that `match` returned."""
        if not len(blocks):
            return
        for block in blocks[self._references[blocks] == 0].tolist():
            del (self._pinned if self._pins[block] else self._cached)[block]
        self._references[blocks] += 1

    def release(self, blocks: IntArray, fence: int) -> None:
        """Remove one owner of each block; `fence` is the last step that the owners scheduled to touch them.

        `blocks` are in sequence order, of one owner or of several; the tail of a prefix is evicted before its head.
        """
        if not len(blocks):
            return
        counts, orphans = self._references[blocks], blocks[::-1]
        if np.count_nonzero(counts <= 0):
            raise RuntimeError(f"release of blocks without owner: {blocks.tolist()}")
        if np.count_nonzero(counts > 1):  # two owners may give up the same block
            np.subtract.at(self._references, blocks, 1)
            orphans = np.array([*dict.fromkeys(orphans[self._references[orphans] == 0].tolist())], np.int32)
        else:
            self._references[blocks] = 0
        self._fence[blocks] = np.maximum(self._fence[blocks], fence)
        latest = self._fence[orphans]
        steps = sorted(set(latest.tolist()))
        for step in steps:
            group = orphans if len(steps) == 1 else orphans[latest == step]
            if step <= self._answered:
                self._set_free(group)
            else:
                self._fenced.append((step, group))
                self._num_fenced += len(group)

    def answered(self, step: int) -> None:
        """Free the blocks that were fenced by steps up to `step`: their outputs arrived."""
        self._answered = max(self._answered, step)
        if not self._fenced:
            return
        waiting: deque[tuple[int, IntArray]] = deque()
        for fence, blocks in self._fenced:
            if fence <= self._answered:
                self._num_fenced -= len(blocks)
                self._set_free(blocks)
            else:
                waiting.append((fence, blocks))
        self._fenced = waiting

    def pin(self, blocks: IntArray) -> None:
        """Pin owned `blocks`, each at most once, while an operation outside steps reads or writes them."""
        if (self._references[blocks] <= 0).any():
            raise RuntimeError(f"cannot pin blocks without owner: {blocks.tolist()}")
        self._pins[blocks] += 1

    def unpin(self, blocks: IntArray) -> None:
        """Unpin the blocks of a completed operation; those that waited only for it are freed."""
        if (self._pins[blocks] <= 0).any():
            raise RuntimeError(f"blocks without pin: {blocks.tolist()}")
        self._pins[blocks] -= 1
        waited = [block for block in blocks.tolist() if block in self._pinned and not self._pins[block]]
        for block in waited:
            del self._pinned[block]
        # Sequence order, tail first, as in `release`.
        self._set_free(np.array(waited[::-1], np.int32))

    def register(self, blocks: Iterable[int], keys: Iterable[bytes]) -> bool:
        """Name owned blocks of settled tokens; return True if any has a new name.

        A block or a name that is taken stays as it is; -1 stands for no block.
        """
        block_of, key_of, found = self._block_of, self._key_of, []
        for block, key in zip(blocks, keys, strict=True):
            if block >= 0 and key not in block_of and block not in key_of:
                block_of[key] = block
                key_of[block] = key
                found.append(block)
        self._named[found] = True
        return bool(found)

    def forget_prefixes(self) -> None:
        """Drop all reusable content; owners keep their blocks."""
        self._block_of.clear()
        self._key_of.clear()
        self._named[:] = False
        cached, self._cached = self._cached, OrderedDict()
        self._empty[self._num_empty : self._num_empty + len(cached)] = np.fromiter(cached, np.int32, len(cached))
        self._num_empty += len(cached)
        if self._recorder is not None:
            self._recorder.cleared()

    def free_blocks(self) -> set[int]:
        """Return the blocks that an allocation can take, those that hold a reusable prefix included."""
        return {*self._empty[: self._num_empty].tolist(), *self._cached}

    def check_integrity(self, owners: Iterable[npt.NDArray[np.int32]]) -> None:
        """Raise `RuntimeError` unless free, fenced and owned blocks partition the pool and refcounts equal `owners`."""
        expected = np.zeros(self.num_blocks, np.int32)
        for table in owners:
            np.add.at(expected, table, 1)
        empty = self._empty[: self._num_empty].tolist()
        fenced = [block for _, blocks in self._fenced for block in blocks.tolist()] + list(self._pinned)
        free = empty + list(self._cached) + fenced
        if len(set(free)) != len(free):
            raise RuntimeError("a block is free or fenced twice")
        if (expected != self._references).any():
            wrong = np.flatnonzero(expected != self._references)
            raise RuntimeError(f"reference counts differ from owners for blocks {wrong.tolist()}")
        if set(free) != set(np.flatnonzero(expected == 0).tolist()):
            raise RuntimeError("free and fenced blocks are not the blocks without owner")
        if len(fenced) != self.num_fenced:
            raise RuntimeError("the number of fenced blocks is wrong")
        if any(not self._pins[block] for block in self._pinned):
            raise RuntimeError("a block without pin waits for an unpin")

    def _evict(self, count: int) -> IntArray:
        taken = [self._cached.popitem(last=False)[0] for _ in range(count)]
        keys = [self._key_of.pop(block) for block in taken]
        for key in keys:
            del self._block_of[key]
        self._named[taken] = False
        if self._recorder is not None:
            self._recorder.removed(keys)
        return np.array(taken, np.int32)

    def _set_free(self, blocks: IntArray) -> None:
        self._fence[blocks] = -1
        if np.count_nonzero(self._pins[blocks]):
            self._pinned.update(dict.fromkeys(blocks[self._pins[blocks] > 0].tolist()))
            blocks = blocks[self._pins[blocks] == 0]
        self.num_freed += len(blocks)
        named = self._named[blocks]
        if np.count_nonzero(named):
            self._cached.update(dict.fromkeys(blocks[named].tolist()))
            blocks = blocks[~named]
        self._empty[self._num_empty : self._num_empty + len(blocks)] = blocks
        self._num_empty += len(blocks)
