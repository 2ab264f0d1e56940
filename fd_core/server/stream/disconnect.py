"""A client that goes away cancels the work done for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, TypeVar

from fastapi import Request
from starlette.types import Receive

from fd_core.http.errors import ApiError

__all__ = ["UntilDisconnect", "unless_gone"]

_LONG_BYTES: Final = 8192
"""What a shorter body asks for is read before anybody could leave."""

T = TypeVar("T")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return what comes of `work`, which is cancelled if the client leaves; its body must have been read before.

    Raises `ApiError` (499), which nobody sees, if the client left.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) <= len(str(_LONG_BYTES)) and int(length) <= _LONG_BYTES:
        return await work
    async with UntilDisconnect(request.receive):
        return await work
    raise ApiError(499, "the client went away", code="client_gone")


@dataclass(slots=True)
class UntilDisconnect:
    """Runs a block until it ends or the client disconnects; then `gone` is true and the block was cancelled.

    Works as `asyncio.timeout` does: the task is cancelled once, and the cancellation ends with the block unless
    somebody else cancelled the task as well. The body of the request must have been read before. Leave the block
    before the last part of the answer is sent: servers report the end of an answer as a disconnect too.
    """

    receive: Receive
    gone: bool = False
    _fired: bool = False
    _task: asyncio.Task[Any] = field(init=False)
    _cancelling: int = field(init=False)
    _watch: asyncio.Task[None] = field(init=False)

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
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._fired = True
        self._task.cancel()
