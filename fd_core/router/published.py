"""What workers say that they hold: exactly that, while they go on saying it. Pure.

A worker names its blocks by keys that only it can make, and tells their tokens. `Mirror` gives each block the key that
the router itself would give it, with the worker's block size; a prompt is hashed with each size as far as somebody's
blocks go. So sizes need not agree, and what is found is exact.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fd_core.kv.events import BEGINNING, TOKEN_BYTES, Cleared, KVEvent, Removed, Stored
from fd_core.kv.prefix import PrefixHasher
from fd_core.router.prefix_index import block_hasher
from fd_core.router.workers import Registry, Worker
from fd_core.types import IntArray

__all__ = ["MAX_BLOCK_SIZE", "Mirror", "Prompt", "Published"]

MAX_BLOCK_SIZE: Final = 1 << 16
"""Tokens; larger blocks are taken for nonsense."""


class Prompt:
    """One prompt, hashed with any block size, as far as it is looked at and once for each size."""

    def __init__(self, tokens: IntArray, hasher: PrefixHasher, keys: Sequence[bytes]) -> None:
        """`tokens`: int32 of shape [n]; `keys`: of its blocks by `hasher`, as far as they are known already."""
        self._tokens = tokens
        self._chains = {hasher.block_size: (hasher, list(keys))}

    def held(self, block_size: int, keys: Container[bytes]) -> int:
        """Return how many leading tokens lie in blocks that `keys` holds one after the other."""
        if block_size not in self._chains:
            self._chains[block_size] = (block_hasher(block_size), [])
        hasher, chain = self._chains[block_size]
        for index in range(len(self._tokens) // block_size):
            if index == len(chain):
                hasher.extend(chain, hasher.root(""), self._tokens, (index + 1) * block_size)
            if chain[index] not in keys:
                return index * block_size
        return len(self._tokens) // block_size * block_size


@dataclass(slots=True)
class _Account:
    """What one incarnation told."""

    block_size: int
    keys: set[bytes] = field(default_factory=set)


class Published:
    """Who tells what it holds, and what that is. Incarnations count from `begins` until they end or are removed."""

    def __init__(self, registry: Registry, capacity: int) -> None:
        """`capacity`: blocks of one worker."""
        self.capacity = capacity
        self._registry = registry
        self._accounts: dict[Worker, _Account] = {}
        self._events: dict[Worker, int] = {}

    def begins(self, worker: Worker, block_size: int, instance: str) -> bool:
        """The process `instance` begins to tell what `worker` holds; return whether it is that worker's process."""
        member = self._registry.member(worker)
        if member is None or member.instance not in (None, instance):
            return False
        self._accounts[worker] = _Account(block_size)
        return True

    def holds(self, worker: Worker, keys: Iterable[bytes]) -> bool:
        """`worker` holds blocks of these keys; return whether it still counts."""
        account = self._told(worker)
        if account is not None:
            account.keys.update(keys)
        return account is not None

    def dropped(self, worker: Worker, keys: Iterable[bytes]) -> bool:
        """`worker` holds blocks of these keys no longer; return whether it still counts."""
        account = self._told(worker)
        if account is not None:
            account.keys.difference_update(keys)
        return account is not None

    def cleared(self, worker: Worker) -> bool:
        """`worker` holds nothing; return whether it still counts."""
        account = self._told(worker)
        if account is not None:
            account.keys.clear()
        return account is not None

    def ends(self, worker: Worker) -> None:
        """Nobody tells any longer what `worker` holds."""
        self._accounts.pop(worker, None)

    def remove(self, worker: Worker) -> None:
        """This incarnation is gone."""
        self.ends(worker)
        self._events.pop(worker, None)

    def tokens(self, worker: Worker, prompt: Prompt) -> int | None:
        """Return how many leading tokens of a prompt `worker` holds; None if it does not tell what it holds."""
        account = self._accounts.get(worker)
        return None if account is None else prompt.held(account.block_size, account.keys)

    def blocks(self, worker: Worker) -> int | None:
        """Return how many blocks `worker` holds; None if it does not tell."""
        account = self._accounts.get(worker)
        return None if account is None else len(account.keys)

    def events(self, worker: Worker) -> int:
        """Return how many events of this incarnation were taken."""
        return self._events.get(worker, 0)

    def _told(self, worker: Worker) -> _Account | None:
        account = self._accounts.get(worker)
        if account is not None:
            self._events[worker] = self._events.get(worker, 0) + 1
        return account


class Mirror:
    """Follows the events of one worker, and names its blocks as the router does."""

    def __init__(self, published: Published, worker: Worker, block_size: int) -> None:
        """Raises `ValueError` for a block size that cannot be."""
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"it has blocks of {block_size} tokens")
        self._published = published
        self._worker = worker
        self._block_size = block_size
        self._hasher = block_hasher(block_size)
        self._root = self._hasher.root("")
        self._names: dict[bytes, bytes] = {}
        """The worker's keys of what it holds, to the router's."""

    def apply(self, event: KVEvent) -> bool:
        """Follow one event; return whether the worker still counts.

        Raises `ValueError` for an event that does not fit what was told before, and for more blocks than may be.
        """
        match event:
            case Stored():
                return self._published.holds(self._worker, self._store(event))
            case Removed(keys):
                gone = [name for key in keys if (name := self._names.pop(key, None)) is not None]
                return self._published.dropped(self._worker, gone)
            case Cleared():
                self._names.clear()
                return self._published.cleared(self._worker)

    def _store(self, event: Stored) -> list[bytes]:
        parent = self._root if event.parent == BEGINNING else self._names.get(event.parent)
        if parent is None:
            raise ValueError("it told blocks behind one that it does not hold")
        if not event.keys or len(event.tokens) != len(event.keys) * self._block_size * TOKEN_BYTES:
            raise ValueError("it told blocks without all their tokens")
        if len(self._names) + len(event.keys) > self._published.capacity:
            raise ValueError(f"it holds more than the {self._published.capacity:,} blocks of max-index-blocks")
        tokens = np.frombuffer(event.tokens, f"<i{TOKEN_BYTES}")
        chain: list[bytes] = []
        self._hasher.extend(chain, parent, tokens, len(tokens))
        for key, name in zip(event.keys, chain, strict=True):
            self._names[key] = name
        return chain
