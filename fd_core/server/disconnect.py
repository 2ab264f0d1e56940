"""A client that goes away cancels the work done for it."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

__all__ = ["UntilDisconnect"]


class UntilDisconnect:
    """Runs a block until it ends or the client disconnects; then `gone` is true and the block was cancelled.

    Works as `asyncio.timeout` does: the task is cancelled once, and the cancellation ends with the block unless
    somebody else cancelled the task as well. The body of the request must have been read before. Leave the block
    before the last part of the answer is sent: servers report the end of an answer as a disconnect too.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._fired = False
        self.gone = False

    async def __aenter__(self) -> UntilDisconnect:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a disconnect can be watched for from within a task only")
        self._task = task
        self._cancelling = task.cancelling()
        self._watch = asyncio.create_task(self._wait())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._watch.cancel()
        if not self._fired:
            return False
        if self._task.uncancel() > self._cancelling:
            return False
        self.gone = True
        return kind is not None and issubclass(kind, asyncio.CancelledError)

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._fired = True
        self._task.cancel()
