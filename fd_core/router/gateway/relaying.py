"""The answer of one worker: held back until its first bytes can be sent, then passed on as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import aiohttp

from fd_core.router.gateway.events import EventCutter
from fd_core.router.gateway.timeouts import SilenceTimer

__all__ = ["TROUBLE", "UpstreamAnswer", "WorkerLost", "read_up_to"]

TROUBLE: Final = (aiohttp.ClientError, TimeoutError, OSError)
"""Exceptions that a request to a worker may raise."""
_HELD_BYTES: Final = 1 << 20
"""A JSON answer up to this size is sent once it is whole, so that until then another worker can give it."""


class WorkerLost(Exception):
    """The answer of a worker broke off."""


class UpstreamAnswer:
    """An answer whose headers have come. `begin` returns the first bytes to send, `rest` yields all others."""

    def __init__(self, response: aiohttp.ClientResponse, *, ends_with_done: bool) -> None:
        """`ends_with_done`: a stream of this path is complete only with a last event `[DONE]`."""
        self._response = response
        readable = response.content_type == "text/event-stream" and "Content-Encoding" not in response.headers
        self._cutter = EventCutter() if readable else None
        self._ends_with_done = ends_with_done and response.status == 200
        self._ended = False

    @property
    def is_stream(self) -> bool:
        """Whether the answer consists of server-sent events."""
        return self._cutter is not None

    @property
    def whole(self) -> bool:
        """Whether `begin` returned the whole answer."""
        return self._ended and not self.is_stream

    @property
    def complete(self) -> bool:
        """Whether the answer came to its end, as far as the gateway can see."""
        return self._ended and (self._cutter is None or not self._ends_with_done or self._cutter.done)

    @property
    def told_error(self) -> bool:
        """Whether the answer ended with an error event of the worker."""
        return self._cutter is not None and self._cutter.told_error

    async def begin(self) -> bytes:
        """Return the first bytes. Raises `WorkerLost` if a stream ends without any, and what `TROUBLE` names."""
        content = self._response.content
        if self._cutter is not None:
            while chunk := await content.readany():
                if ready := self._cutter.push(chunk):
                    return ready
            self._ended = True
            ready = self._cutter.rest()
            if self._ends_with_done and not self._cutter.done:
                raise WorkerLost
            return ready
        if self._response.content_type != "application/json":
            first = await content.readany()
            self._ended = not first
            return first
        parts: list[bytes] = []
        size = 0
        while size <= _HELD_BYTES:
            chunk = await content.readany()
            if not chunk:
                self._ended = True
                break
            parts.append(chunk)
            size += len(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def rest(self, silence: SilenceTimer) -> AsyncIterator[bytes]:
        """Yield the rest as it comes. Raises `WorkerLost` if it breaks off before it is complete.

        `silence` measures the waits for pieces; its `TimeoutError` may be raised here or where the pieces go.
        """
        cutter = self._cutter
        while not self._ended:
            silence.start()
            try:
                chunk = await self._response.content.readany()
                silence.stop()
            except TROUBLE as error:
                if cutter is not None and self._ends_with_done and cutter.done:
                    self._ended = True  # nothing but the end of the connection is missing
                    return
                raise WorkerLost from error
            if not chunk:
                self._ended = True
                break
            ready = chunk if cutter is None else cutter.push(chunk)
            if ready:
                yield ready
        if cutter is not None and (last := cutter.rest()):
            yield last
        if not self.complete:
            raise WorkerLost


async def read_up_to(content: aiohttp.StreamReader, limit: int) -> bytes:
    """Return all of a body, or its first `limit` bytes."""
    parts: list[bytes] = []
    while limit > 0 and (part := await content.read(limit)):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)
