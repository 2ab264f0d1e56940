"""The KV that workers report to hold. It counts exactly, as long as a worker goes on reporting. Pure.

A worker names its blocks by keys that only it can make, and reports their tokens. Here each block gets the key
that the router itself would give it, with the worker's block size; a prompt is hashed with each block size, as far as
some worker holds its blocks. So block sizes need not agree, and matches are exact.

A worker may have several engines with blocks of their own. It computes a request where most of the prompt is, so it
holds as much of a prompt as that engine which holds the most.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fd_core.kv.prefix import PrefixHasher
from fd_core.router.prefix_index import Holders, block_hasher
from fd_core.router.selection import Numbers, Places
from fd_core.router.workers import Registry, RouterWorker
from fd_core.types import IntArray
from fd_core.types.kv_events import BEGINNING, TOKEN_BYTES, Cleared, KVEvent, Removed, Stored

MAX_BLOCK_SIZE: Final = 1 << 16
"""Tokens; larger block sizes are taken for nonsense."""
MAX_ENGINES: Final = 1 << 10
"""Of one worker; more are taken for nonsense."""
_AHEAD: Final = 16
"""Blocks that are hashed together: one by one takes twice as long."""


class HashedPrompt:
    """One prompt, hashed with any block size: once for each size, and as far as blocks are asked for."""

    def __init__(self, tokens: IntArray, hasher: PrefixHasher, keys: Sequence[bytes]) -> None:
        """`tokens`: int32 of shape [n]; `keys`: keys of the first blocks by `hasher`, as far as they are known."""
        self._tokens = tokens
        self._chains = {hasher.block_size: (hasher, list(keys))}

    def keys(self, block_size: int) -> Iterator[bytes]:
        """Yield the keys of the full blocks of this size, hashed a few ahead of those that are asked for."""
        if block_size not in self._chains:
            self._chains[block_size] = (block_hasher(block_size), [])
        hasher, chain = self._chains[block_size]
        blocks = len(self._tokens) // block_size
        for index in range(blocks):
            if index == len(chain):
                hasher.extend(chain, hasher.root(""), self._tokens, min(blocks, index + _AHEAD) * block_size)
            yield chain[index]


class ReportedKV:
    """The blocks of every worker that reports. Reports of an incarnation count from `begin` to `end` or `remove`."""

    def __init__(self, registry: Registry, capacity: int, places: Places) -> None:
        """`capacity`: blocks that one engine may report."""
        self._capacity = capacity
        self._registry = registry
        self._places = places
        self._mirrors: dict[RouterWorker, list[_Mirror]] = {}
        self._sizes: dict[Hashable, int] = {}
        """Tokens in a block of each engine that reports, by its name in `Places`."""
        self._further: dict[RouterWorker, tuple[Hashable, ...]] = {}
        """Names of the engines behind the first, of workers that have several; the first has the worker's."""
        self._found: _EnginesThatReport | None = None
        """The same by place, until somebody begins or ends."""
        self._holders: dict[int, Holders] = {}
        """Who holds a block, by the size of blocks."""
        self._num_events: dict[RouterWorker, int] = {}

    def __len__(self) -> int:
        """Workers that report."""
        return len(self._mirrors)

    def begin(self, worker: RouterWorker, block_size: int, instance: str, engines: int = 1) -> bool:
        """The process `instance` begins to report for `worker`; return whether it is that worker's process.

        Raises `ValueError` for a block size or a number of engines that cannot be.
        """
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"it has blocks of {block_size} tokens")
        if not 1 <= engines <= MAX_ENGINES:
            raise ValueError(f"it has {engines} engines")
        member = self._registry.member(worker)
        if member is None or member.instance not in (None, instance):
            return False
        self.end(worker)
        self._found = None
        holders = self._holders.setdefault(block_size, Holders(self._places))
        names = (worker, *((worker, engine) for engine in range(1, engines)))
        self._mirrors[worker] = [_Mirror(name, block_size, self._capacity, holders) for name in names]
        self._sizes |= dict.fromkeys(names, block_size)
        if engines > 1:
            self._further[worker] = names[1:]
        return True

    def apply(self, worker: RouterWorker, event: KVEvent) -> bool:
        """Follow an event; return whether reports still count. `ValueError` if it does not fit, or for too many."""
        mirrors = self._mirrors.get(worker)
        if mirrors is None:
            return False
        if not 0 <= event.engine < len(mirrors):
            raise ValueError("it reported blocks of an engine that it does not have")
        mirrors[event.engine].apply(event)
        self._num_events[worker] = self.num_events(worker) + 1
        return True

    def end(self, worker: RouterWorker) -> None:
        """Forget the blocks of `worker`: it reports no more."""
        self._found = None
        for mirror in self._mirrors.pop(worker, ()):
            mirror.clear()
            if self._sizes.pop(mirror.name) not in self._sizes.values():
                del self._holders[mirror.block_size]
        for name in self._further.pop(worker, ()):
            self._places.leave(name)

    def remove(self, worker: RouterWorker) -> None:
        """Forget an incarnation that is gone."""
        self.end(worker)
        self._num_events.pop(worker, None)

    def leading_tokens(self, prompt: HashedPrompt) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Return how many leading tokens each worker holds, and who is silent (and has 0), both by place."""
        tokens = np.zeros(len(self._places), np.int64)
        if self._found is None or len(self._found.sizes) != len(tokens):
            sizes = np.zeros(len(tokens), np.int64)
            sizes[self._places.among(self._sizes)] = [*self._sizes.values()]
            owners = [worker for worker, names in self._further.items() for _ in names]
            further = [name for names in self._further.values() for name in names]
            self._found = _EnginesThatReport(sizes, self._places.among(owners), self._places.among(further))
        found = self._found
        for size, holders in self._holders.items():
            np.copyto(tokens, holders.unbroken(prompt.keys(size)) * size, where=found.sizes == size)
        np.maximum.at(tokens, found.owners, tokens[found.further])
        return tokens, found.sizes == 0

    def num_blocks(self, worker: RouterWorker) -> int | None:
        """Return how many blocks `worker` holds; None if it does not report."""
        mirrors = self._mirrors.get(worker)
        return None if mirrors is None else sum(map(len, mirrors))

    def num_events(self, worker: RouterWorker) -> int:
        """Return how many events of this incarnation were taken."""
        return self._num_events.get(worker, 0)


class _EnginesThatReport(NamedTuple):
    sizes: Numbers
    """Tokens in a block, by place; 0 for whoever does not report."""
    owners: Numbers
    """Place of the worker of each engine behind the first."""
    further: Numbers
    """Places of those engines."""


class _Mirror:
    """The blocks that one engine of an incarnation reports to hold, named as the router names them."""

    def __init__(self, name: Hashable, block_size: int, capacity: int, holders: Holders) -> None:
        """`name` is that of its place."""
        self.name = name
        self.block_size = block_size
        self._holders = holders
        self._bit = holders.bit(name)
        self._capacity = capacity
        self._hasher = block_hasher(block_size)
        self._root = self._hasher.root("")
        self._names: dict[bytes, bytes] = {}
        """The worker's keys of the blocks that it holds, to the router's."""

    def __len__(self) -> int:
        return len(self._names)

    def clear(self) -> None:
        """Hold nothing any longer."""
        self._holders.discard(self._bit, self._names.values())
        self._names.clear()

    def apply(self, event: KVEvent) -> None:
        match event:
            case Stored():
                self._store(event)
            case Removed(keys):
                gone = [name for key in keys if (name := self._names.pop(key, None)) is not None]
                self._holders.discard(self._bit, gone)
            case Cleared():
                self.clear()

    def _store(self, event: Stored) -> None:
        parent = self._root if event.parent == BEGINNING else self._names.get(event.parent)
        if parent is None:
            raise ValueError("it reported blocks that follow a block which it does not hold")
        if not event.keys or len(event.tokens) != len(event.keys) * self.block_size * TOKEN_BYTES:
            raise ValueError("it reported blocks without all their tokens")
        if len(self._names) + len(event.keys) > self._capacity:
            raise ValueError(f"it holds more than the {self._capacity:,} blocks of max-index-blocks")
        tokens = np.frombuffer(event.tokens, f"<i{TOKEN_BYTES}")
        chain: list[bytes] = []
        self._hasher.extend(chain, parent, tokens, len(tokens))
        self._holders.discard(self._bit, [name for key in event.keys if (name := self._names.get(key)) is not None])
        self._names.update(zip(event.keys, chain, strict=True))
        self._holders.add(self._bit, chain)
