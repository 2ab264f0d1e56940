"""Timeouts of requests whose worker is found to be unreachable while they wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from fd_core.router.workers import RouterWorker

__all__ = ["SilenceTimer", "WorkerTimeouts"]


class SilenceTimer:
    """Measures for how long the worker of one answer has been silent, and ends the answer on demand."""

    __slots__ = ("_limit", "_loop", "_since")

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None

    def start(self) -> None:
        """Measure from here on: the next piece of the answer is waited for."""
        self._since = self._loop.time()

    def stop(self) -> None:
        """Measure no more: a piece came, and until the next `start` only the client holds the answer up."""
        self._since = None

    @property
    def expired(self) -> bool:
        """Whether the `TimeoutError` of the answer means that its worker was given up."""
        return self._limit.expired()

    def expire(self, silence: float) -> bool:
        """End the answer if its worker has been silent for `silence` seconds; return whether it was."""
        now = self._loop.time()
        if self._since is None or now - self._since < silence:
            return False
        self._limit.reschedule(now)
        return True


class WorkerTimeouts:
    """Requests that wait for workers, by the address of the worker: a request may outlive an incarnation.

    A wait that expires raises `TimeoutError` where it waits, as a deadline does.
    """

    def __init__(self) -> None:
        self._first_bytes: dict[str, set[SilenceTimer]] = {}
        self._streams: dict[str, set[SilenceTimer]] = {}

    def first_bytes(self, worker: RouterWorker) -> AbstractAsyncContextManager[SilenceTimer]:
        """Wait for the first bytes of an answer of `worker` within the block."""
        return _within(self._first_bytes, worker.url, started=True)

    def stream(self, worker: RouterWorker) -> AbstractAsyncContextManager[SilenceTimer]:
        """Pass on the rest of an answer of `worker` within the block; the timer is to be started for each wait."""
        return _within(self._streams, worker.url)

    def expire_first_bytes(self, worker: RouterWorker) -> int:
        """End every wait for first bytes of `worker`, so that the requests go elsewhere; return their number."""
        return sum(timer.expire(0.0) for timer in self._first_bytes.get(worker.url, ()))

    def expire_streams(self, worker: RouterWorker, silence: float) -> int:
        """End every answer of which nothing came from `worker` for `silence` seconds; return their number."""
        return sum(timer.expire(silence) for timer in self._streams.get(worker.url, ()))


@contextlib.asynccontextmanager
async def _within(
    timers: dict[str, set[SilenceTimer]], url: str, *, started: bool = False
) -> AsyncIterator[SilenceTimer]:
    async with asyncio.timeout(None) as limit:
        timer = SilenceTimer(limit)
        if started:
            timer.start()
        timers.setdefault(url, set()).add(timer)
        try:
            yield timer
        finally:
            timers[url].discard(timer)
            if not timers[url]:
                del timers[url]
