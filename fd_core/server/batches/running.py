"""Sends the requests of a file, several at a time, and hands on each answer as a whole line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Final

import msgspec

from fd_core.server.batches.asgi import AsgiAnswer
from fd_core.server.batches.lines import BatchAnswer, BatchLine, LineError, answered, failed

__all__ = ["Ask", "BatchProgress", "run_requests"]

Ask = Callable[[str, bytes, str], Awaitable[AsgiAnswer]]
"""Called with path, body and request id."""
_ATTEMPTS: Final = 20
_PAUSE_SECONDS: Final = 5.0
"""Longest wait before a request is sent again that found no room or no engine."""


class BatchProgress(msgspec.Struct):
    """How far a run is."""

    total: int
    completed: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        """Lines that are over."""
        return self.completed + self.failed


async def run_requests(
    requests: Iterator[BatchLine],
    ask: Ask,
    take: Callable[[BatchAnswer], None],
    *,
    at_once: int,
    known: Collection[str] = frozenset(),
    going_on: Callable[[], bool] = lambda: True,
) -> None:
    """Send requests, at most `at_once` at a time, and give each answer to `take` as it comes.

    Lines whose ids are `known` are passed over. No further request begins once `going_on` says no. Whoever cancels this
    gets no answer of the requests that were on their way.
    """
    free = asyncio.Semaphore(at_once)

    async def one(request: BatchLine) -> None:
        try:
            take(await _answer(request, ask, going_on))
        finally:
            free.release()

    async with asyncio.TaskGroup() as group:
        for request in requests:
            if request.id in known:
                continue
            await free.acquire()
            if not going_on():
                free.release()
                return
            if request.error is not None:
                take(failed(request, request.error))
                free.release()
                await asyncio.sleep(0)  # a file of wrong lines must not hold up everybody else
            else:
                group.create_task(one(request))


async def _answer(request: BatchLine, ask: Ask, going_on: Callable[[], bool]) -> BatchAnswer:
    """Return the line for a request; one that found no room, or an engine about to restart, is sent again.

    One that a limit of its key holds back waits for as long as it takes, while the batch goes on.
    """
    tries = failures = 0
    while True:
        try:
            answer = await ask(request.url, request.body, f"{request.id}-{tries}" if tries else request.id)
        except ConnectionError as error:
            return failed(request, LineError("no_answer", str(error) or "the answer broke off"))
        tries += 1
        wait = answer.headers.get("retry-after", "")
        if answer.status == 429 and wait.isdecimal() and going_on():
            await asyncio.sleep(min(int(wait), _PAUSE_SECONDS))
            continue
        failures += 1
        if answer.status not in (429, 503) or "x-should-retry" in answer.headers or failures == _ATTEMPTS:
            break
        await asyncio.sleep(min(_PAUSE_SECONDS, 0.05 * 2**failures))
    return answered(request, answer.status, answer.headers.get("x-request-id", request.id), answer.body)
