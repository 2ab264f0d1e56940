"""Requests that wait for a worker, which end when the worker is found to be unreachable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fd_core.router.workers import Worker

__all__ = ["Flow", "Waits"]


class Flow:
    """One answer on its way; tells since when its worker has been silent."""

    __slots__ = ("_limit", "_loop", "_since")

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None

    def waits(self) -> None:
        """The next piece is waited for."""
        self._since = self._loop.time()

    def came(self) -> None:
        """It came; what holds the answer up until the next `waits` is the client."""
        self._since = None

    @property
    def was_cut(self) -> bool:
        """Whether the `TimeoutError` that comes out of it means that its worker was given up."""
        return self._limit.expired()

    def cut(self, silence: float) -> bool:
        """End it if its worker has been silent for so many seconds; return whether it was."""
        now = self._loop.time()
        if self._since is None or now - self._since < silence:
            return False
        self._limit.reschedule(now)
        return True


class Waits:
    """Who waits for whom, by the address of the worker: a request outlives the incarnation that it was given to.

    A wait that is cut raises `TimeoutError` where it waits, as a deadline does.
    """

    def __init__(self) -> None:
        self._first: dict[str, set[Flow]] = {}
        self._later: dict[str, set[Flow]] = {}

    @contextlib.asynccontextmanager
    async def on(self, worker: Worker) -> AsyncIterator[None]:
        """Wait within the block for the first bytes of `worker`."""
        async with _within(self._first, worker.url) as flow:
            flow.waits()
            yield

    @contextlib.asynccontextmanager
    async def stream(self, worker: Worker) -> AsyncIterator[Flow]:
        """Pass on what follows the first bytes within the block."""
        async with _within(self._later, worker.url) as flow:
            yield flow

    def cut(self, worker: Worker) -> int:
        """End every wait for the first bytes of `worker`, which go elsewhere; return how many there were."""
        return sum(flow.cut(0.0) for flow in self._first.get(worker.url, ()))

    def cut_streams(self, worker: Worker, silence: float) -> int:
        """End every answer of which nothing came from `worker` for so many seconds; return how many there were."""
        return sum(flow.cut(silence) for flow in self._later.get(worker.url, ()))


@contextlib.asynccontextmanager
async def _within(flows: dict[str, set[Flow]], url: str) -> AsyncIterator[Flow]:
    async with asyncio.timeout(None) as limit:
        flow = Flow(limit)
        flows.setdefault(url, set()).add(flow)
        try:
            yield flow
        finally:
            flows[url].discard(flow)
            if not flows[url]:
                del flows[url]
