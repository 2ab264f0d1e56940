"""Prefixes that workers served or compute: radix trees over blocks of prompts.

A block's key is the hash of the whole path that leads to it, so a node of the tree is found by its key and needs no
links. Each worker has a tree of its own: it gets credit for its own longest prefix, and its tree goes when it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fd_core.kv.prefix import PrefixHasher
from fd_core.router.expiring import Expiring
from fd_core.router.workers import RouterWorker
from fd_core.types import IntArray

__all__ = ["PrefixIndex", "PrefixesInFlight", "block_hasher", "block_keys"]


def block_hasher(block_size: int) -> PrefixHasher:
    """Return the hasher that names prompt blocks in a router. It has no secret: the names never leave the router."""
    return PrefixHasher(block_size=block_size, identity="router")


def block_keys(hasher: PrefixHasher, tokens: IntArray, salt: str = "", adapter: str = "") -> tuple[bytes, ...]:
    """Return the keys of the full blocks of `tokens`, int32 of shape [n]; keys of other salts or adapters differ."""
    chain: list[bytes] = []
    hasher.extend(chain, hasher.root(salt, adapter), tokens, len(tokens))
    return tuple(chain)


class PrefixIndex:
    """Prompt blocks that each worker served, and so is believed to hold.

    A block is believed to be held for `duration` seconds, and at most `capacity` blocks of each worker are. Recording
    costs time in proportion to the blocks of the prompt, matching to their logarithm, whatever the index holds. The end
    of a prefix leaves before its beginning, so the index always holds whole paths from the root.
    """

    def __init__(self, *, duration: float, capacity: int) -> None:
        self._duration = duration
        self._capacity = capacity
        self._held: dict[RouterWorker, Expiring[bytes, None]] = {}

    def __len__(self) -> int:
        """Blocks that take memory, of all workers together."""
        return sum(map(len, self._held.values()))

    def record(self, worker: RouterWorker, keys: Sequence[bytes], now: float) -> None:
        """`worker` served a prompt of these blocks."""
        held = self._held.get(worker)
        if held is None:
            held = self._held[worker] = Expiring(duration=self._duration, capacity=self._capacity)
        for key in reversed(keys[: self._capacity]):  # the first block last, so that it is the last to leave
            held.put(key, None, now)

    def match(self, worker: RouterWorker, keys: Sequence[bytes], now: float) -> int:
        """Return how many leading blocks `worker` is believed to hold."""
        held = self._held.get(worker)
        if held is None:
            return 0
        return _leading(keys, lambda key: held.has(key, now))

    def remove(self, worker: RouterWorker) -> None:
        """Forget all blocks of `worker`: it is gone, or came back empty."""
        self._held.pop(worker, None)

    def sweep(self, now: float) -> None:
        """Give back the memory of expired blocks."""
        for worker, held in list(self._held.items()):
            held.sweep(now)
            if not len(held):
                del self._held[worker]

    def blocks(self, worker: RouterWorker) -> int:
        """Return how many blocks the index keeps for `worker`, expired ones included until a sweep."""
        return len(self._held.get(worker, ()))


class PrefixesInFlight:
    """Prompts that workers have been given and that have not ended there: what they are about to hold.

    A radix tree for each worker, kept as counts: how many prompts end at a block, and how many blocks follow it. A
    prompt costs time in proportion to the blocks that no other prompt in flight shares with it, whatever is in flight;
    matching costs the logarithm of its blocks. Nothing of a prompt is remembered after its end.
    """

    def __init__(self) -> None:
        self._nodes: dict[RouterWorker, dict[bytes, int]] = {}

    def __len__(self) -> int:
        """Distinct blocks, of all workers together."""
        return sum(map(len, self._nodes.values()))

    def begin(self, worker: RouterWorker, keys: tuple[bytes, ...]) -> None:
        """`worker` was given a prompt of these blocks; `end` has to follow."""
        if not keys:
            return
        nodes = self._nodes.setdefault(worker, {})
        for key in reversed(keys):
            nodes[key] = count = nodes.get(key, 0) + 1
            if count > 1:  # then all blocks before it are there already
                return

    def end(self, worker: RouterWorker, keys: tuple[bytes, ...]) -> None:
        """`worker` is through with a prompt that began, well or not."""
        if not keys:
            return
        nodes = self._nodes[worker]
        for key in reversed(keys):
            nodes[key] -= 1
            if nodes[key]:
                return
            del nodes[key]
        if not nodes:
            del self._nodes[worker]

    def match(self, worker: RouterWorker, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt `worker` is computing for others."""
        nodes = self._nodes.get(worker)
        return _leading(keys, nodes.__contains__) if nodes else 0


def _leading(keys: Sequence[bytes], is_held: Callable[[bytes], bool]) -> int:
    """Return how many leading keys are held, given that none is held behind one that is not."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if is_held(keys[middle]):
            low = middle + 1
        else:
            high = middle
    return low
