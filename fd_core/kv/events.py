"""Which known prefixes a device holds, told as events to whoever sends requests there.

`Recorder` notes beside the block pool what gets a name and what loses it. `HeldBlocks` follows the events and can tell
all of them again from the beginning, for who comes late. Blocks are told with their token ids, because every reader
names prefixes in its own way: the names here are keyed by a secret. Pure.

The law of the events: the parent of what is stored is held at that moment, or is the beginning of a prompt. A block
may be held while the one before it is not (another copy of that block had the name, and left); whoever stores such a
block tells the path to it as stored, and then as removed what of the path is not held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from fd_core.types import IntArray

__all__ = ["BEGINNING", "TOKEN_BYTES", "Cleared", "HeldBlocks", "KVEvent", "KVPage", "Recorder", "Removed", "Stored"]

BEGINNING: Final = b""
"""The parent of the first block of a prompt."""
TOKEN_BYTES: Final = 4
_LIMIT: Final = 1 << 16
"""Blocks that wait to be told at most."""


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """Consecutive blocks of one path are held from here on; some of them may have been before."""

    parent: bytes
    """Key of the block before the first one."""
    keys: tuple[bytes, ...]
    tokens: bytes
    """Token ids of the blocks, int32 in little-endian order, [len(keys) * block size]."""


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """Blocks are held no longer; the blocks behind them may still be."""

    keys: tuple[bytes, ...]


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """Nothing that was told counts any more; what is held is told again, as far as it is known."""


KVEvent = Stored | Removed | Cleared


class KVPage(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker answers who asks for its events."""

    instance: str
    """Names the process, as its health check does."""
    reading: str
    """Fingerprint of the server's prompt reader, see `fd_core.text.prompt_reader`."""
    block_size: int
    """Tokens in a block."""
    next: int
    """Number of the event behind the last one here: what to ask for then."""
    events: tuple[KVEvent, ...] = ()
    """In order. Those for who asks for the first time, or too late, begin with `Cleared`."""


class Recorder:
    """Notes what a pool's known prefixes become, until somebody takes the notes.

    If nobody does, it drops them all and begins again with `Cleared`. Prompts with a salt are not told: their tokens
    are for nobody else.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        """`limit`: blocks in the events that wait at most."""
        self._limit = limit
        self._events: list[KVEvent] = []
        self._size = 0
        self._told: set[bytes] = set()
        """Keys that were told as stored, and not as removed since."""

    def take(self) -> tuple[KVEvent, ...]:
        """Return what happened since the last call, in order."""
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
        """Blocks `first` to `upto` of the path `chain`, whose tokens are `tokens`, got their names where they had none.

        `holds` says of a key whether the pool knows it.
        """
        new = [index for index in range(first, upto) if chain[index] not in self._told and holds(chain[index])]
        if not new:
            return
        start, end = new[0], new[-1] + 1
        while start and chain[start - 1] not in self._told:
            start -= 1
        keys = tuple(chain[start:end])
        part = np.ascontiguousarray(tokens[start * block_size : end * block_size], f"<i{TOKEN_BYTES}").tobytes()
        self._told.update(keys)
        self._note(Stored(chain[start - 1] if start else BEGINNING, keys, part), len(keys))
        self.removed([key for key in keys if not holds(key)])

    def removed(self, keys: Sequence[bytes]) -> None:
        """The pool knows `keys` no longer."""
        gone = tuple(key for key in keys if key in self._told)
        if gone:
            self._told.difference_update(gone)
            self._note(Removed(gone), len(gone))

    def cleared(self) -> None:
        """The pool knows nothing any more."""
        self._events, self._size = [Cleared()], 1
        self._told.clear()

    def _note(self, event: KVEvent, size: int) -> None:
        self._events.append(event)
        self._size += size
        if self._size > self._limit:
            self.cleared()


@dataclass(slots=True)
class _Block:
    parent: bytes
    tokens: bytes
    held: bool = True
    children: int = 0
    """Blocks behind it that are kept."""


class HeldBlocks:
    """What is held according to the events, with the paths that lead there."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._blocks: dict[bytes, _Block] = {}
        """A block comes behind its parent. Those not held are kept while blocks behind them are."""
        self._held = 0

    def __len__(self) -> int:
        return self._held

    def __contains__(self, key: bytes) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.held

    def __iter__(self) -> Iterator[bytes]:
        return (key for key, block in self._blocks.items() if block.held)

    def apply(self, event: KVEvent) -> None:
        """Follow one event. Raises `ValueError` for one that breaks the law of the events."""
        match event:
            case Stored(parent, keys, tokens):
                if parent != BEGINNING and parent not in self:
                    raise ValueError("the parent of stored blocks is not held")
                size = self._block_bytes
                for index, key in enumerate(keys):
                    self._store(key, parent, tokens[index * size : (index + 1) * size])
                    parent = key
            case Removed(keys):
                for key in keys:
                    self._remove(key)
            case Cleared():
                self._blocks.clear()
                self._held = 0

    def events(self) -> tuple[KVEvent, ...]:
        """Return events that tell somebody who knows nothing what is held."""
        events: list[KVEvent] = [Cleared()]
        path: list[tuple[bytes, _Block]] = []
        for key, block in self._blocks.items():
            if path and block.parent != path[-1][0]:
                events.append(_stored(path))
                path = []
            path.append((key, block))
        if path:
            events.append(_stored(path))
        gone = tuple(key for key, block in self._blocks.items() if not block.held)
        return (*events, Removed(gone)) if gone else tuple(events)

    def _store(self, key: bytes, parent: bytes, tokens: bytes) -> None:
        block = self._blocks.get(key)
        if block is None:
            self._blocks[key] = _Block(parent, tokens)
            if parent != BEGINNING:
                self._blocks[parent].children += 1
            self._held += 1
        elif not block.held:
            block.held = True
            self._held += 1

    def _remove(self, key: bytes) -> None:
        block = self._blocks.get(key)
        if block is None or not block.held:
            return
        block.held = False
        self._held -= 1
        while block is not None and not block.held and not block.children:
            del self._blocks[key]
            key = block.parent
            block = self._blocks.get(key)
            if block is not None:
                block.children -= 1


def _stored(path: Sequence[tuple[bytes, _Block]]) -> Stored:
    return Stored(path[0][1].parent, tuple(key for key, _ in path), b"".join(block.tokens for _, block in path))
