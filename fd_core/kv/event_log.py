"""Log of the KV events of a server's engines, in the server's process, for routers that follow them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

import msgspec

from fd_core.types.kv_events import Cleared, KVEvent, StoredBlocks

_CAPACITY: Final = 1 << 14
"""Maximum number of blocks in the events of the log; a reader that lags further starts over."""


class KVEventLog:
    """The latest events, numbered, and the set of stored blocks that results from all events. Used from one event
    loop."""

    def __init__(self, block_size: int, engines: int = 1, capacity: int = _CAPACITY) -> None:
        self.block_size = block_size
        self._capacity = capacity
        self._stored = tuple(StoredBlocks(block_size) for _ in range(engines))
        self._events: deque[tuple[KVEvent, int]] = deque()
        """Events with the number of blocks in each, oldest first."""
        self._size = 0
        self._next = 0
        self.closed = False
        """True if no more events will be appended."""
        self._waiting: set[asyncio.Event] = set()

    @property
    def engines(self) -> int:
        """Return the number of engines that publish events."""
        return len(self._stored)

    def extend(self, events: Iterable[KVEvent], engine: int = 0) -> None:
        """Append events that an engine published."""
        for event in _of(engine, events):
            self._stored[engine].apply(event)
            size = 1 if isinstance(event, Cleared) else len(event.keys)
            self._events.append((event, size))
            self._size += size
            self._next += 1
        while self._size > self._capacity:
            self._size -= self._events.popleft()[1]
        self._wake()

    def restart(self, engine: int = 0) -> None:
        """Record that an engine was lost, and its KV with it."""
        self.extend((Cleared(),), engine)

    def read(self, after: int | None) -> tuple[int, tuple[KVEvent, ...]]:
        """Return the number of the next event and the events from number `after` on.

        Without a number, or if the log lacks events from that number on, the events of each engine begin with `Cleared`
        and list all its stored blocks.
        """
        first = self._next - len(self._events)
        if after is None or not first <= after <= self._next:
            whole = enumerate(self._stored)
            return self._next, tuple(event for engine, stored in whole for event in _of(engine, stored.events()))
        return self._next, tuple(event for event, _ in islice(self._events, after - first, None))

    async def wait(self, after: int | None, seconds: float) -> None:
        """Wait until `read(after)` would return an event, at most `seconds`."""
        if after != self._next or self.closed:
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
        """End every `wait`, at shutdown of the server."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        for woken in self._waiting:
            woken.set()


def _of(engine: int, events: Iterable[KVEvent]) -> Iterable[KVEvent]:
    return (msgspec.structs.replace(event, engine=engine) for event in events) if engine else events
