"""The log of an engine's KV events, in the process of the engine's client, for routers that follow them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

from fd_core.kv.events import Cleared, KVEvent, StoredBlocks

__all__ = ["KVEventLog"]

_CAPACITY: Final = 1 << 14
"""Blocks in the events that the log keeps; a reader that is further behind begins anew."""


class KVEventLog:
    """The latest events, numbered, and the blocks that all events together leave stored. Used from one event loop."""

    def __init__(self, block_size: int, capacity: int = _CAPACITY) -> None:
        self.block_size = block_size
        self._capacity = capacity
        self._stored = StoredBlocks(block_size)
        self._events: deque[tuple[KVEvent, int]] = deque()
        """Events with the number of blocks in each, oldest first."""
        self._size = 0
        self._next = 0
        """Number of the next event."""
        self._closed = False
        self._waiting: set[asyncio.Event] = set()

    @property
    def closed(self) -> bool:
        """Whether the log gets no more events."""
        return self._closed

    def extend(self, events: Iterable[KVEvent]) -> None:
        """Append events of the engine."""
        for event in events:
            self._stored.apply(event)
            size = 1 if isinstance(event, Cleared) else len(event.keys)
            self._events.append((event, size))
            self._size += size
            self._next += 1
        while self._size > self._capacity:
            self._size -= self._events.popleft()[1]
        self._wake()

    def restart(self) -> None:
        """Note that the engine is gone, and its KV with it."""
        self.extend((Cleared(),))

    def read(self, after: int | None) -> tuple[int, tuple[KVEvent, ...]]:
        """Return the number of the next event and the events from number `after` on.

        Without a number, or if the log lacks events from that number on, the events begin with `Cleared` and tell all
        stored blocks.
        """
        first = self._next - len(self._events)
        if after is None or not first <= after <= self._next:
            return self._next, self._stored.events()
        return self._next, tuple(event for event, _ in islice(self._events, after - first, None))

    async def wait(self, after: int | None, seconds: float) -> None:
        """Wait until `read(after)` would return an event, at most `seconds`."""
        if after != self._next or self._closed:
            return
        woken = asyncio.Event()
        self._waiting.add(woken)
        try:
            async with asyncio.timeout(seconds):
                await woken.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(woken)

    def close(self) -> None:
        """End every `wait`: the server ends."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        for woken in self._waiting:
            woken.set()
