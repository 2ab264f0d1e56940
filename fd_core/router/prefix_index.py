"""Index of the workers that hold a block, served or reported: one integer per block, one bit per worker.

Each engine of a worker that has several is a worker here. So a prompt is compared with the blocks of a thousand workers
in a few operations per block, not once per worker.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fd_core.kv.prefix import PrefixHasher
from fd_core.router.selection import Numbers, WorkerIndices
from fd_core.router.workers import Registry, RouterWorker
from fd_core.types import IntArray
from fd_core.types.kv_events import BEGINNING, TOKEN_BYTES, Cleared, KVEvent, Removed, Stored

_FEW: Final = 8
"""Number of bits up to which they are iterated one by one."""


class Holders(dict[bytes, int]):
    """The workers that hold each block, as bits."""

    def __init__(self, indices: WorkerIndices) -> None:
        """`indices` assigns the bits; before a bit is reused, the caller discards the blocks of its previous worker."""
        super().__init__()
        self._indices = indices

    def add(self, worker: Hashable, keys: Iterable[bytes]) -> None:
        """Record that `worker` holds blocks that it did not hold."""
        bit = 1 << self._indices[worker]
        for key in keys:
            others = self.get(key)
            # One number for all blocks that this worker alone holds, which are most.
            self[key] = bit if others is None else others | bit

    def discard(self, worker: Hashable, keys: Iterable[bytes]) -> None:
        """Record that `worker` no longer holds blocks; blocks that it did not hold are ignored."""
        bit = 1 << self._indices[worker]
        for key in keys:
            holders = self.get(key, 0)
            if holders == bit:
                del self[key]
            elif holders & bit:
                self[key] = holders ^ bit

    def leading(self, keys: Sequence[bytes]) -> Numbers:
        """Return leading blocks by index, if no block is held without those before it; logarithmic in the blocks."""
        found: list[tuple[int, int]] = []
        first = self.get(keys[0], 0) if keys else 0
        open_ = [(1, len(keys), first)] if first else []
        while open_:
            least, most, here = open_.pop()
            if least == most:
                found.append((least, here))
                continue
            middle = (least + most + 1) // 2
            on = here & self.get(keys[middle - 1], 0)
            if on:
                open_.append((middle, most, on))
            if on != here:
                open_.append((least, middle - 1, here ^ on))
        return self._by_index(found)

    def unbroken(self, keys: Iterable[bytes]) -> Numbers:
        """Return the same, block by block, if blocks may be held without those before; reads one key ahead."""
        here, found, count = -1, [], 0
        for key in keys if self else ():
            on = here & self.get(key, 0)
            if count and on != here:
                found.append((count, here ^ on))
            here = on
            if not here:
                break
            count += 1
        return self._by_index([*found, (count, here)] if count else [])

    def _by_index(self, found: Iterable[tuple[int, int]]) -> Numbers:
        indices = self._indices.size
        counts = np.zeros(indices, np.int64)
        for count, here in found:
            if here.bit_count() <= _FEW:
                while here:
                    first = here & -here
                    counts[first.bit_length() - 1] = count
                    here ^= first
            else:
                bits = np.frombuffer(here.to_bytes(indices // 8 + 1, "little"), np.uint8)
                counts[np.unpackbits(bits, bitorder="little", count=indices).view(bool)] = count
        return counts


def block_hasher(block_size: int) -> PrefixHasher:
    """Return the hasher that names prompt blocks in a router. It has no secret: the names never leave the router."""
    return PrefixHasher(block_size=block_size, identity="router")


def block_keys(hasher: PrefixHasher, tokens: IntArray, salt: str = "", adapter: str = "") -> tuple[bytes, ...]:
    """Return the keys of the full blocks of `tokens`, int32 of shape [n]; keys of other salts or adapters differ."""
    chain: list[bytes] = []
    root = hasher.root(salt, adapter) if salt or adapter else hasher.plain_root
    hasher.extend(chain, root, tokens, len(tokens))
    return tuple(chain)


class PrefixIndex:
    """Prompt blocks that each worker served, and so is believed to hold.

    A block is believed to be held for `duration` seconds, and at most `capacity` blocks of each worker are. Recording
    costs time in proportion to the blocks of the prompt, matching to their logarithm, at any size of the index. The end
    of a prefix leaves before its beginning, so the index always holds whole paths from the root. The readings of the
    clock that are passed in never go backwards.
    """

    def __init__(self, *, duration: float, capacity: int, indices: WorkerIndices) -> None:
        self._duration = duration
        self._capacity = capacity
        self._held: dict[RouterWorker, OrderedDict[bytes, float]] = {}
        """Time at which each block was last served, least recently served first."""
        self._indices = indices
        self._holders = Holders(indices)
        self._oldest: list[tuple[float, int, RouterWorker]] = []
        """Heap of the workers that hold blocks, by a time before which none of these blocks was served."""
        self._last = 0.0
        """Time at which a block was last served."""

    def __len__(self) -> int:
        """Blocks that take memory, of all workers together."""
        return sum(map(len, self._held.values()))

    def record(self, worker: RouterWorker, keys: Sequence[bytes], now: float) -> None:
        """Record that `worker` served a prompt of these blocks."""
        if not keys:
            return
        if self._oldest and now - self._oldest[0][0] >= self._duration:
            self.sweep(now)
        held = self._held.get(worker)
        if held is None:
            held = self._held[worker] = OrderedDict()
            heapq.heappush(self._oldest, (now, worker.incarnation, worker))
        self._last = now
        new = []
        for key in reversed(keys[: self._capacity]):  # the first block last, so that it is the last to leave
            if key in held:
                held.move_to_end(key)
            else:
                new.append(key)
            held[key] = now
        self._holders.add(worker, new)
        if len(held) > self._capacity:
            self._holders.discard(worker, [held.popitem(last=False)[0] for _ in range(len(held) - self._capacity)])

    def holds(self, keys: Sequence[bytes]) -> bool:
        """Return True if some worker may hold the first block of a prompt."""
        return bool(keys) and keys[0] in self._holders

    def match(self, keys: Sequence[bytes], now: float) -> Numbers:
        """Return how many leading blocks each worker is believed to hold, by index."""
        self.sweep(now)
        return self._holders.leading(keys)

    def remove(self, worker: RouterWorker) -> None:
        """Forget all blocks of `worker`: it was lost, or restarted with an empty cache."""
        held = self._held.pop(worker, None)
        if held is not None:
            self._holders.discard(worker, held)
            self._oldest = [entry for entry in self._oldest if entry[2] != worker]
            heapq.heapify(self._oldest)

    def sweep(self, now: float) -> None:
        """Forget expired blocks; costs time in proportion to what has expired since the last call."""
        if self._oldest and now - self._last >= self._duration:  # all of them
            self._oldest.clear()
            self._held.clear()
            self._holders = Holders(self._indices)
        while self._oldest and now - self._oldest[0][0] >= self._duration:
            _, number, worker = heapq.heappop(self._oldest)
            held = self._held[worker]
            gone = [key for key, _ in takewhile(lambda entry: now - entry[1] >= self._duration, held.items())]
            for key in gone:
                del held[key]
            self._holders.discard(worker, gone)
            if held:
                heapq.heappush(self._oldest, (next(iter(held.values())), number, worker))
            else:
                del self._held[worker]

    def blocks(self, worker: RouterWorker) -> int:
        """Return how many blocks the index keeps for `worker`, expired ones included until a sweep."""
        return len(self._held.get(worker, ()))


class PrefixesInFlight:
    """Prompts assigned to workers that have not ended there: blocks that the workers are about to hold.

    A radix tree for each worker, kept as counts: how many prompts end at a block, and how many blocks follow it. A
    prompt costs time in proportion to the blocks that no other prompt in flight shares with it, however many these are;
    matching costs the logarithm of its blocks. Nothing of a prompt is remembered after its end.
    """

    def __init__(self, indices: WorkerIndices) -> None:
        self._nodes: dict[RouterWorker, dict[bytes, int]] = {}
        self._holders = Holders(indices)

    def __len__(self) -> int:
        """Distinct blocks, of all workers together."""
        return sum(map(len, self._nodes.values()))

    def __contains__(self, worker: RouterWorker) -> bool:
        """Return True if `worker` has been given a prompt that has not ended there."""
        return worker in self._nodes

    def begin(self, worker: RouterWorker, keys: tuple[bytes, ...]) -> None:
        """Add a prompt of these blocks that was assigned to `worker`; `end` has to follow."""
        if not keys:
            return
        nodes = self._nodes.setdefault(worker, {})
        new = []
        for key in reversed(keys):
            nodes[key] = count = nodes.get(key, 0) + 1
            if count > 1:  # then all blocks before it are there already
                break
            new.append(key)
        self._holders.add(worker, new)

    def end(self, worker: RouterWorker, keys: tuple[bytes, ...]) -> None:
        """Record the end, with success or not, of a prompt that was assigned to `worker`."""
        if not keys:
            return
        nodes = self._nodes[worker]
        gone = []
        for key in reversed(keys):
            left = nodes[key] - 1
            if left:
                nodes[key] = left
                break
            del nodes[key]
            gone.append(key)
        self._holders.discard(worker, gone)
        if not nodes:
            del self._nodes[worker]

    def match(self, keys: Sequence[bytes]) -> Numbers | None:
        """Return how many leading blocks of a prompt each worker is computing for others, by index; None for none."""
        return self._holders.leading(keys) if keys and keys[0] in self._holders else None


MAX_BLOCK_SIZE: Final = 1 << 16
"""Tokens; larger block sizes are treated as invalid."""
MAX_ENGINES: Final = 1 << 10
"""Engines of one worker; more are treated as invalid."""
_AHEAD: Final = 16
"""Blocks that are hashed together: one by one takes twice as long."""


class HashedPrompt:
    """One prompt, hashed with any block size: once for each size, and only as far as blocks are needed."""

    def __init__(self, tokens: IntArray, hasher: PrefixHasher, keys: Sequence[bytes]) -> None:
        """`tokens`: int32 of shape [n]; `keys`: keys of the first blocks by `hasher`, as far as they are known."""
        self._tokens = tokens
        self._chains = {hasher.block_size: (hasher, list(keys))}

    def keys(self, block_size: int) -> Iterator[bytes]:
        """Yield the keys of the full blocks of this size, hashed a few ahead of those that are consumed."""
        if block_size not in self._chains:
            self._chains[block_size] = (block_hasher(block_size), [])
        hasher, chain = self._chains[block_size]
        blocks = len(self._tokens) // block_size
        for index in range(blocks):
            if index == len(chain):
                hasher.extend(chain, hasher.root(""), self._tokens, min(blocks, index + _AHEAD) * block_size)
            yield chain[index]


class ReportedKV:
    """The blocks of every worker that reports; they count exactly, from `begin` to `end` or `remove`.

    A worker names its blocks by keys that only it can make, and reports their tokens. Here each block gets the key
    that the router itself would give it, with the worker's block size; a prompt is hashed with each block size, as far
    as some worker holds its blocks. So block sizes need not agree, and matches are exact. A worker computes a request
    on that of its engines where most of the prompt is, so it holds as much as the engine which holds the most.
    """

    def __init__(self, registry: Registry, capacity: int, indices: WorkerIndices) -> None:
        """`capacity`: blocks that one engine may report."""
        self._capacity = capacity
        self._registry = registry
        self._indices = indices
        self._mirrors: dict[RouterWorker, list[_Mirror]] = {}
        self._sizes: dict[Hashable, int] = {}
        """Tokens in a block of each engine that reports, by its name in `WorkerIndices`."""
        self._further: dict[RouterWorker, tuple[Hashable, ...]] = {}
        """Names of the engines after the first, of workers that have several; the first has the worker's."""
        self._found: _EnginesThatReport | None = None
        """The same by index, until a worker begins or stops to report."""
        self._holders: dict[int, Holders] = {}
        """Holders of each block, by block size."""
        self._num_events: dict[RouterWorker, int] = {}

    def __len__(self) -> int:
        """Workers that report."""
        return len(self._mirrors)

    def begin(self, worker: RouterWorker, block_size: int, instance: str, engines: int = 1) -> bool:
        """Begin the reports of `instance`; return True if it is the worker's process. `ValueError` for bad numbers."""
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"invalid block size of {block_size} tokens")
        if not 1 <= engines <= MAX_ENGINES:
            raise ValueError(f"invalid number of engines: {engines}")
        member = self._registry.member(worker)
        if member is None or member.instance not in (None, instance):
            return False
        self.end(worker)
        self._found = None
        holders = self._holders.setdefault(block_size, Holders(self._indices))
        names = (worker, *((worker, engine) for engine in range(1, engines)))
        self._mirrors[worker] = [_Mirror(name, block_size, self._capacity, holders=holders) for name in names]
        self._indices.among(names)  # assigned now, so that arrays have room for them
        self._sizes |= dict.fromkeys(names, block_size)
        if engines > 1:
            self._further[worker] = names[1:]
        return True

    def apply(self, worker: RouterWorker, event: KVEvent) -> bool:
        """Apply an event; return True while reports still count. `ValueError` if it does not fit, or for too many."""
        mirrors = self._mirrors.get(worker)
        if mirrors is None:
            return False
        if not 0 <= event.engine < len(mirrors):
            raise ValueError("it reported blocks of an unknown engine")
        mirrors[event.engine].apply(event)
        self._num_events[worker] = self.num_events(worker) + 1
        return True

    def end(self, worker: RouterWorker) -> None:
        """Forget the blocks of `worker`, which stopped reporting."""
        self._found = None
        for mirror in self._mirrors.pop(worker, ()):
            mirror.clear()
            if self._sizes.pop(mirror.name) not in self._sizes.values():
                del self._holders[mirror.block_size]
        for name in self._further.pop(worker, ()):
            self._indices.release(name)

    def remove(self, worker: RouterWorker) -> None:
        """Forget an incarnation that was lost."""
        self.end(worker)
        self._num_events.pop(worker, None)

    def leading_tokens(self, prompt: HashedPrompt) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Return the leading tokens that each worker holds, and which do not report (and have 0), both by index."""
        tokens = np.zeros(self._indices.size, np.int64)
        if self._found is None or len(self._found.sizes) != len(tokens):
            sizes = np.zeros(len(tokens), np.int64)
            sizes[self._indices.among(self._sizes)] = [*self._sizes.values()]
            owners = [worker for worker, names in self._further.items() for _ in names]
            further = [name for names in self._further.values() for name in names]
            self._found = _EnginesThatReport(sizes, self._indices.among(owners), self._indices.among(further))
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
        """Return how many events of this incarnation were applied."""
        return self._num_events.get(worker, 0)


class _EnginesThatReport(NamedTuple):
    sizes: Numbers
    """Tokens in a block, by index; 0 for engines that do not report."""
    owners: Numbers
    """Index of the worker of each engine after the first."""
    further: Numbers
    """Indices of those engines."""


class _Mirror:
    """The blocks that one engine of an incarnation reports to hold, named as the router names them."""

    def __init__(self, name: Hashable, block_size: int, capacity: int, holders: Holders) -> None:
        self.name = name
        self.block_size = block_size
        self._holders = holders
        self._capacity = capacity
        self._hasher = block_hasher(block_size)
        self._root = self._hasher.root("")
        self._names: dict[bytes, bytes] = {}
        """The worker's keys of the blocks that it holds, to the router's."""

    def __len__(self) -> int:
        return len(self._names)

    def clear(self) -> None:
        self._holders.discard(self.name, self._names.values())
        self._names.clear()

    def apply(self, event: KVEvent) -> None:
        match event:
            case Stored():
                self._store(event)
            case Removed(keys):
                gone = [name for key in keys if (name := self._names.pop(key, None)) is not None]
                self._holders.discard(self.name, gone)
            case Cleared():
                self.clear()

    def _store(self, event: Stored) -> None:
        parent = self._root if event.parent == BEGINNING else self._names.get(event.parent)
        if parent is None:
            raise ValueError("it reported blocks whose preceding block it does not hold")
        if not event.keys or len(event.tokens) != len(event.keys) * self.block_size * TOKEN_BYTES:
            raise ValueError("it reported blocks without all their tokens")
        if len(self._names) + len(event.keys) > self._capacity:
            raise ValueError(f"it reported more blocks than max-index-blocks ({self._capacity:,})")
        tokens = np.frombuffer(event.tokens, f"<i{TOKEN_BYTES}")
        chain: list[bytes] = []
        self._hasher.extend(chain, parent, tokens, len(tokens))
        self._holders.discard(self.name, [name for key in event.keys if (name := self._names.get(key)) is not None])
        self._names.update(zip(event.keys, chain, strict=True))
        self._holders.add(self.name, chain)
