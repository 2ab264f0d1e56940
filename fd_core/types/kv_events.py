"""KV events: the known prefixes that a device stores, for routers that send requests there.

`Recorder` turns changes of the block pool into events. `StoredBlocks` follows events and can replace all of them
by few that lead to the same blocks, for a reader that joins late. Events contain token ids, as every reader computes
keys of prefixes in its own way: the keys here depend on a secret. Pure.

Invariant of the events: when blocks are stored, their parent is stored already or is the beginning of a prompt. A block
may be stored while the block before it is not (another copy of that block was the known one, and was evicted). For such
a block the whole path is published as stored, and then the missing blocks of the path as removed.

A server with several engines publishes events of all. Each event names its engine; the invariant holds per engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from fd_core.types import IntArray

BEGINNING: Final = b""
"""Parent of the first block of a prompt."""
TOKEN_BYTES: Final = 4
_LIMIT: Final = 1 << 16
"""Limit of blocks in events that were not taken."""


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """Consecutive blocks of one path are stored; some of them may have been stored before."""

    parent: bytes
    """Key of the block before the first one."""
    keys: tuple[bytes, ...]
    tokens: bytes
    """Token ids of the blocks, int32 in little-endian order, [len(keys) * block size]."""
    engine: int = 0
    """Index of the server's engine that stores them."""


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """Blocks that were evicted; their descendants may still be stored."""

    keys: tuple[bytes, ...]
    engine: int = 0


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """All events of the engine so far are void: it stores only blocks in later `Stored` events."""

    engine: int = 0


KVEvent = Stored | Removed | Cleared


class KVPage(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's response to a router that polls KV events."""

    instance: str
    """Id of the worker's process, as in its health check."""
    reading: str
    """Fingerprint of the server's prompt reader, see `fd_core.text.prompt_reader`."""
    block_size: int
    """Tokens in a block."""
    next: int
    """Number of the first event of the next page."""
    events: tuple[KVEvent, ...] = ()
    """Events in order; on a reader's first page, or if it lags too far, those of an engine begin with `Cleared`."""
    engines: int = 1


class Recorder:
    """Records which known prefixes a block pool gains and loses, until `take` is called.

    Events that are not taken are dropped and recording begins again with `Cleared`. Prompts with a salt are not
    recorded: no other client may see their tokens.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        """`limit`: limit of blocks in events that were not taken."""
        self._limit = limit
        self._events: list[KVEvent] = []
        self._size = 0
        self._announced: set[bytes] = set()
        """Keys in `Stored` events and in no later `Removed` event."""

    def take(self) -> tuple[KVEvent, ...]:
        """Return the events since the last call, in order."""
        events, self._events, self._size = tuple(self._events), [], 0
        return events

    def stored(
        self,
        chain: Sequence[bytes],
        tokens: IntArray,
        block_size: int,
        first: int,
        upto: int,
        holds: Callable[[bytes], bool],
    ) -> None:
        """Record blocks `first` to `upto` of the path `chain` that became known to the pool, which `holds` keys."""
        new = [index for index in range(first, upto) if chain[index] not in self._announced and holds(chain[index])]
        if not new:
            return
        start, end = new[0], new[-1] + 1
        while start and chain[start - 1] not in self._announced:
            start -= 1
        keys = tuple(chain[start:end])
        part = np.ascontiguousarray(tokens[start * block_size : end * block_size], f"<i{TOKEN_BYTES}").tobytes()
        self._announced.update(keys)
        self._note(Stored(chain[start - 1] if start else BEGINNING, keys, part), len(keys))
        self.removed([key for key in keys if not holds(key)])

    def removed(self, keys: Sequence[bytes]) -> None:
        """Record that the pool evicted `keys`."""
        gone = tuple(key for key in keys if key in self._announced)
        if gone:
            self._announced.difference_update(gone)
            self._note(Removed(gone), len(gone))

    def cleared(self) -> None:
        """Record that the pool evicted everything."""
        self._events, self._size = [Cleared()], 1
        self._announced.clear()

    def _note(self, event: KVEvent, size: int) -> None:
        self._events.append(event)
        self._size += size
        if self._size > self._limit:
            self.cleared()


class _Block(msgspec.Struct):
    parent: bytes
    tokens: bytes
    stored: bool = True
    """False for a block that is only on the path to a stored one."""
    children: int = 0
    """Number of blocks whose parent is this one."""


class StoredBlocks:
    """The blocks that events of one engine leave stored, with the paths that lead to them."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._blocks: dict[bytes, _Block] = {}
        """Blocks by key, each after its parent."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: bytes) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.stored

    def __iter__(self) -> Iterator[bytes]:
        return (key for key, block in self._blocks.items() if block.stored)

    def apply(self, event: KVEvent) -> None:
        """Apply one event. Raises `ValueError` for an event that breaks the invariant of the events."""
        match event:
            case Stored(parent, keys, tokens):
                if parent != BEGINNING and parent not in self:
                    raise ValueError("the parent of stored blocks is not stored")
                size = self._block_bytes
                for index, key in enumerate(keys):
                    self._store(key, parent, tokens[index * size : (index + 1) * size])
                    parent = key
            case Removed(keys):
                for key in keys:
                    self._remove(key)
            case Cleared():
                self._blocks.clear()
                self._count = 0

    def events(self) -> tuple[KVEvent, ...]:
        """Return events that begin with `Cleared` and leave the same blocks stored."""
        events: list[KVEvent] = [Cleared()]
        path: list[tuple[bytes, _Block]] = []
        for key, block in self._blocks.items():
            if path and block.parent != path[-1][0]:
                events.append(_stored(path))
                path = []
            path.append((key, block))
        if path:
            events.append(_stored(path))
        gone = tuple(key for key, block in self._blocks.items() if not block.stored)
        return (*events, Removed(gone)) if gone else tuple(events)

    def _store(self, key: bytes, parent: bytes, tokens: bytes) -> None:
        block = self._blocks.get(key)
        if block is None:
            self._blocks[key] = _Block(parent, tokens)
            if parent != BEGINNING:
                self._blocks[parent].children += 1
            self._count += 1
        elif not block.stored:
            block.stored = True
            self._count += 1

    def _remove(self, key: bytes) -> None:
        block = self._blocks.get(key)
        if block is None or not block.stored:
            return
        block.stored = False
        self._count -= 1
        while block is not None and not block.stored and not block.children:
            del self._blocks[key]
            key = block.parent
            block = self._blocks.get(key)
            if block is not None:
                block.children -= 1


def _stored(path: Sequence[tuple[bytes, _Block]]) -> Stored:
    return Stored(path[0][1].parent, tuple(key for key, _ in path), b"".join(block.tokens for _, block in path))
