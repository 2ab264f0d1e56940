"""Requests that wait for a worker's first byte, which end when the worker is found to be unreachable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fd_core.router.workers import Worker

__all__ = ["Waits"]


class Waits:
    """Who waits for whom. A wait that is cut raises `TimeoutError` where it waits, as a deadline does."""

    def __init__(self) -> None:
        self._waiting: dict[Worker, set[asyncio.Timeout]] = {}

    @contextlib.asynccontextmanager
    async def on(self, worker: Worker) -> AsyncIterator[None]:
        """Wait for `worker` within the block."""
        try:
            async with asyncio.timeout(None) as limit:
                self._waiting.setdefault(worker, set()).add(limit)
                yield
        finally:
            others = self._waiting[worker]
            others.discard(limit)
            if not others:
                del self._waiting[worker]

    def cut(self, worker: Worker) -> int:
        """End every wait for `worker`; return how many there were."""
        now = asyncio.get_running_loop().time()
        waiting = self._waiting.get(worker, set())
        for limit in waiting:
            limit.reschedule(now)
        return len(waiting)
