"""The KV that workers report to hold. It counts exactly, as long as a worker goes on reporting. Pure.

A worker names its blocks by keys that only it can make, and reports their tokens. `Mirror` gives each block the key
that the router itself would give it, with the worker's block size; a prompt is hashed with each block size, as far as
some worker holds its blocks. So block sizes need not agree, and matches are exact.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fd_core.kv.events import BEGINNING, TOKEN_BYTES, Cleared, KVEvent, Removed, Stored
from fd_core.kv.prefix import PrefixHasher
from fd_core.router.prefix_index import block_hasher
from fd_core.router.workers import Registry, RouterWorker
from fd_core.types import IntArray

__all__ = ["MAX_BLOCK_SIZE", "HashedPrompt", "Mirror", "ReportedKV"]

MAX_BLOCK_SIZE: Final = 1 << 16
"""Tokens; larger block sizes are taken for nonsense."""


class HashedPrompt:
    """One prompt, hashed with any block size: once for each size, and as far as blocks are asked for."""

    def __init__(self, tokens: IntArray, hasher: PrefixHasher, keys: Sequence[bytes]) -> None:
        """`tokens`: int32 of shape [n]; `keys`: keys of the first blocks by `hasher`, as far as they are known."""
        self._tokens = tokens
        self._chains = {hasher.block_size: (hasher, list(keys))}

    def leading_tokens(self, block_size: int, keys: Container[bytes]) -> int:
        """Return how many leading tokens lie in blocks that `keys` contains."""
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
class _Report:
    """Blocks that one incarnation reported to hold."""

    block_size: int
    keys: set[bytes] = field(default_factory=set)


class ReportedKV:
    """The blocks of every worker that reports. Reports of an incarnation count from `begin` to `end` or `remove`."""

    def __init__(self, registry: Registry, capacity: int) -> None:
        """`capacity`: blocks that one worker may report."""
        self.capacity = capacity
        self._registry = registry
        self._reports: dict[RouterWorker, _Report] = {}
        self._num_events: dict[RouterWorker, int] = {}

    def begin(self, worker: RouterWorker, block_size: int, instance: str) -> bool:
        """The process `instance` begins to report for `worker`; return whether it is that worker's process."""
        member = self._registry.member(worker)
        if member is None or member.instance not in (None, instance):
            return False
        self._reports[worker] = _Report(block_size)
        return True

    def stored(self, worker: RouterWorker, keys: Iterable[bytes]) -> bool:
        """Add blocks that `worker` came to hold; return whether its reports still count."""
        report = self._report(worker)
        if report is not None:
            report.keys.update(keys)
        return report is not None

    def removed(self, worker: RouterWorker, keys: Iterable[bytes]) -> bool:
        """Take out blocks that `worker` lost; return whether its reports still count."""
        report = self._report(worker)
        if report is not None:
            report.keys.difference_update(keys)
        return report is not None

    def cleared(self, worker: RouterWorker) -> bool:
        """Take out all blocks of `worker`; return whether its reports still count."""
        report = self._report(worker)
        if report is not None:
            report.keys.clear()
        return report is not None

    def end(self, worker: RouterWorker) -> None:
        """Forget the blocks of `worker`: it reports no more."""
        self._reports.pop(worker, None)

    def remove(self, worker: RouterWorker) -> None:
        """Forget an incarnation that is gone."""
        self.end(worker)
        self._num_events.pop(worker, None)

    def leading_tokens(self, worker: RouterWorker, prompt: HashedPrompt) -> int | None:
        """Return how many leading tokens of a prompt `worker` holds; None if it does not report."""
        report = self._reports.get(worker)
        return None if report is None else prompt.leading_tokens(report.block_size, report.keys)

    def num_blocks(self, worker: RouterWorker) -> int | None:
        """Return how many blocks `worker` holds; None if it does not report."""
        report = self._reports.get(worker)
        return None if report is None else len(report.keys)

    def num_events(self, worker: RouterWorker) -> int:
        """Return how many events of this incarnation were taken."""
        return self._num_events.get(worker, 0)

    def _report(self, worker: RouterWorker) -> _Report | None:
        """Return the report that an event of `worker` changes, and count the event; None if it does not count."""
        report = self._reports.get(worker)
        if report is not None:
            self._num_events[worker] = self._num_events.get(worker, 0) + 1
        return report


class Mirror:
    """Follows the KV events of one worker, and names its blocks as the router does."""

    def __init__(self, reported_kv: ReportedKV, worker: RouterWorker, block_size: int) -> None:
        """Raises `ValueError` for a block size that cannot be."""
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"it has blocks of {block_size} tokens")
        self._reported_kv = reported_kv
        self._worker = worker
        self._block_size = block_size
        self._hasher = block_hasher(block_size)
        self._root = self._hasher.root("")
        self._names: dict[bytes, bytes] = {}
        """The worker's keys of the blocks that it holds, to the router's."""

    def apply(self, event: KVEvent) -> bool:
        """Follow one event; return whether the worker's reports still count.

        Raises `ValueError` for an event that does not fit the events before it, and for more blocks than allowed.
        """
        match event:
            case Stored():
                return self._reported_kv.stored(self._worker, self._store(event))
            case Removed(keys):
                gone = [name for key in keys if (name := self._names.pop(key, None)) is not None]
                return self._reported_kv.removed(self._worker, gone)
            case Cleared():
                self._names.clear()
                return self._reported_kv.cleared(self._worker)

    def _store(self, event: Stored) -> list[bytes]:
        parent = self._root if event.parent == BEGINNING else self._names.get(event.parent)
        if parent is None:
            raise ValueError("it reported blocks that follow a block which it does not hold")
        if not event.keys or len(event.tokens) != len(event.keys) * self._block_size * TOKEN_BYTES:
            raise ValueError("it reported blocks without all their tokens")
        if len(self._names) + len(event.keys) > self._reported_kv.capacity:
            raise ValueError(f"it holds more than the {self._reported_kv.capacity:,} blocks of max-index-blocks")
        tokens = np.frombuffer(event.tokens, f"<i{TOKEN_BYTES}")
        chain: list[bytes] = []
        self._hasher.extend(chain, parent, tokens, len(tokens))
        for key, name in zip(event.keys, chain, strict=True):
            self._names[key] = name
        return chain
