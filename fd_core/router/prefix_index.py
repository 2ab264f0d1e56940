"""Who served which prefix: a radix tree over blocks of prompts.

A block's key is the hash of the whole path that leads to it, so a node of the tree is found by its key and needs no
links; each worker's nodes are kept apart, so each gets credit for the longest prefix of its own, and goes with all of
them. Only what a worker really served is recorded.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from fd_core.kv.prefix import PrefixHasher
from fd_core.router.expiring import Expiring
from fd_core.router.workers import Worker
from fd_core.types import IntArray

__all__ = ["Computing", "PrefixIndex", "block_hasher", "block_keys"]


def block_hasher(block_size: int) -> PrefixHasher:
    """Return what names the blocks of prompts in a router. Not keyed: a key tells nobody whose KV to read."""
    return PrefixHasher(block_size=block_size, identity="router")


def block_keys(hasher: PrefixHasher, tokens: IntArray, salt: str = "") -> tuple[bytes, ...]:
    """Return the keys of the full blocks of `tokens`, int32 of shape [n]; those of other salts differ."""
    chain: list[bytes] = []
    hasher.extend(chain, hasher.root(salt), tokens, len(tokens))
    return tuple(chain)


class PrefixIndex:
    """Which leading blocks each worker is believed to hold, for so many seconds and at most so many of each worker.

    Recording costs time in proportion to the blocks of the prompt, matching in proportion to their logarithm, whatever
    the index holds. Of a prefix the end leaves before the beginning: what is held of a worker is always whole paths
    from the root.
    """

    def __init__(self, *, duration: float, capacity: int) -> None:
        self._duration = duration
        self._capacity = capacity
        self._held: dict[Worker, Expiring[bytes, None]] = {}

    def __len__(self) -> int:
        """Blocks that take memory, of all workers together."""
        return sum(map(len, self._held.values()))

    def record(self, worker: Worker, keys: Sequence[bytes], now: float) -> None:
        """`worker` served a prompt of these blocks."""
        held = self._held.get(worker)
        if held is None:
            held = self._held[worker] = Expiring(duration=self._duration, capacity=self._capacity)
        for key in reversed(keys[: self._capacity]):  # the first block last, so that it is the last to leave
            held.put(key, None, now)

    def match(self, worker: Worker, keys: Sequence[bytes], now: float) -> int:
        """Return how many leading blocks `worker` is believed to hold."""
        held = self._held.get(worker)
        if held is None:
            return 0
        return _leading(len(keys), lambda block: held.has(keys[block], now))

    def remove(self, worker: Worker) -> None:
        """Forget all that `worker` held: it is gone, or came back empty."""
        self._held.pop(worker, None)

    def sweep(self, now: float) -> None:
        """Give back the memory of what has expired."""
        for worker, held in list(self._held.items()):
            held.sweep(now)
            if not len(held):
                del self._held[worker]

    def blocks(self, worker: Worker) -> int:
        """Return how many blocks are kept for `worker`, expired ones that no sweep has met included."""
        return len(self._held.get(worker, ()))


class Computing:
    """Prompts that workers have been given and that have not ended there: what they are about to hold.

    Nothing of it is remembered behind the end. Matching looks only at prompts that have their first block in common.
    """

    def __init__(self) -> None:
        self._chains: dict[tuple[Worker, bytes], list[tuple[bytes, ...]]] = {}

    def __len__(self) -> int:
        """Prompts that are noted."""
        return sum(map(len, self._chains.values()))

    def begin(self, worker: Worker, keys: tuple[bytes, ...]) -> None:
        """`worker` was given a prompt of these blocks; `end` has to follow."""
        if keys:
            self._chains.setdefault((worker, keys[0]), []).append(keys)

    def end(self, worker: Worker, keys: tuple[bytes, ...]) -> None:
        """It is through with it, well or not."""
        if not keys:
            return
        chains = self._chains[worker, keys[0]]
        chains.remove(keys)
        if not chains:
            del self._chains[worker, keys[0]]

    def match(self, worker: Worker, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks `worker` is computing for others."""
        chains = self._chains.get((worker, keys[0]), ()) if keys else ()
        return max((_in_common(chain, keys) for chain in chains), default=0)


def _in_common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    return _leading(min(len(one), len(other)), lambda block: one[block] == other[block])


def _leading(blocks: int, there: Callable[[int], bool]) -> int:
    """Return how many leading blocks are there, given that none is behind one that is not."""
    return bisect.bisect_left(range(blocks), True, key=lambda block: not there(block))
