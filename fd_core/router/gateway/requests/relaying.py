"""The answer of one worker: held back until its first bytes can be sent, then streamed as it arrives.

Of server-sent events and lines of JSON only whole ones are passed on, so that an error can follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import msgspec

from fd_core.router.workers import RouterWorker


class SilenceTimer:
    """Measures for how long the worker of one answer has been silent, and ends the answer on demand."""

    __slots__ = ("_limit", "_loop", "_since")

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None

    def start(self) -> None:
        """Start the timer: the next chunk of the answer is awaited."""
        self._since = self._loop.time()

    def stop(self) -> None:
        """Stop the timer: a chunk arrived, and until the next `start` only the client can delay the answer."""
        self._since = None

    @property
    def expired(self) -> bool:
        """True if the `TimeoutError` of the answer was raised because its worker timed out."""
        return self._limit.expired()

    def expire(self, silence: float) -> bool:
        """End the answer if its worker has been silent for `silence` seconds; return True if it was."""
        now = self._loop.time()
        if self._since is None or now - self._since < silence:
            return False
        self._limit.reschedule(now)
        return True


class WorkerTimeouts:
    """Requests that wait for workers, by address, as incarnations change; an expired wait raises `TimeoutError`."""

    def __init__(self) -> None:
        self._first_bytes: dict[str, set[SilenceTimer]] = {}
        self._streams: dict[str, set[SilenceTimer]] = {}

    def first_bytes(self, worker: RouterWorker) -> AbstractAsyncContextManager[SilenceTimer]:
        """Wait for the first bytes of an answer of `worker` within the block."""
        return _within(self._first_bytes, worker.url, started=True)

    def stream(self, worker: RouterWorker) -> AbstractAsyncContextManager[SilenceTimer]:
        """Relay the rest of an answer of `worker` within the block; start the timer for each wait."""
        return _within(self._streams, worker.url)

    def expire_first_bytes(self, worker: RouterWorker) -> int:
        """End every wait for first bytes of `worker`, so that the requests go to others; return their number."""
        return sum(timer.expire(0.0) for timer in self._first_bytes.get(worker.url, ()))

    def expire_streams(self, worker: RouterWorker, silence: float) -> int:
        """End every answer that received nothing from `worker` for `silence` seconds; return their number."""
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


UPSTREAM_ERRORS: Final = (aiohttp.ClientError, TimeoutError, OSError)
"""Exceptions that a request to a worker may raise."""
_RESOURCE_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of the system for lack of descriptors, memory or ports."""
_HELD_BYTES: Final = 1 << 20
"""A JSON answer up to this size is buffered, so that the request can be retried if the worker is lost."""
_DONE: Final = b"[DONE]"
_MAX_HELD_BYTES: Final = 1 << 20
"""Larger events are passed on in pieces."""
_LINES: Final = "application/x-ndjson"
"""Content type of streams in Ollama's format."""


def is_resource_exhaustion(error: BaseException) -> bool:
    """Return True if no connection could be made for lack of local resources, which is not the worker's fault."""
    return isinstance(error, OSError) and error.errno in _RESOURCE_ERRNOS


class WorkerLost(Exception):
    """The answer of a worker is incomplete because the worker was lost."""


class _JsonLine(msgspec.Struct):
    done: bool = False
    error: Any = None


_line: Final = msgspec.json.Decoder(_JsonLine)


class EventCutter:
    """Passes chunks on up to the end of the last whole event. Usually a chunk is one event and nothing is held."""

    def __init__(self, *, lines: bool = False) -> None:
        """`lines`: an event is a line of JSON."""
        self._lines = lines
        self._ends = (b"\n",) if lines else (b"\n\n", b"\r\n\r\n")
        self._held: list[bytes] = []
        self._size = 0
        self._edge = b""
        self._last = b""

    def push(self, chunk: bytes) -> bytes:
        """Process a chunk; return the bytes that may be sent to the client, none if no event has ended."""
        if chunk.endswith(self._ends[0]):
            return self._pass(chunk)
        border = len(self._edge)
        seen = self._edge + chunk
        end = max(_index_after(seen, mark) for mark in self._ends) - border
        if end > 0:
            ready = self._pass(chunk[:end])
            chunk = chunk[end:]
            self._edge = b""
        else:
            ready = b""
        if chunk:
            self._held.append(chunk)
            self._size += len(chunk)
            self._edge = (self._edge + chunk)[-3:]
        return ready if self._size <= _MAX_HELD_BYTES else ready + self.rest()

    def rest(self) -> bytes:
        """Return the bytes that are held back; they are complete if the stream ended well."""
        return self._pass(b"") if self._held else b""

    @property
    def done(self) -> bool:
        """True if the last event passed on marks a complete answer."""
        return self._last_line().done if self._lines else self._last.rstrip().endswith(_DONE)

    @property
    def error_forwarded(self) -> bool:
        """True if the last event passed on is an error. Generated text cannot look like one: its quotes are escaped."""
        if self._lines:
            return self._last_line().error is not None
        last = self._last.rstrip().replace(b"\r\n", b"\n").rpartition(b"\n\n")[2]
        return b'"error"' in last

    def _last_line(self) -> _JsonLine:
        try:
            return _line.decode(self._last.rstrip().rpartition(b"\n")[2])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return _JsonLine()

    def _pass(self, chunk: bytes) -> bytes:
        if self._held:
            chunk = b"".join((*self._held, chunk))
            self._held.clear()
            self._size = 0
        self._edge = b""
        if chunk:
            self._last = chunk[-4096:]
        return chunk


class UpstreamAnswer:
    """An answer whose headers have arrived. `begin` returns the first bytes to send, `rest` yields all others."""

    def __init__(self, response: aiohttp.ClientResponse, *, ends_with_done: bool) -> None:
        """`ends_with_done`: a stream of this path is complete only with a last event that marks it as such."""
        self._response = response
        kind = response.content_type
        readable = kind in ("text/event-stream", _LINES) and "Content-Encoding" not in response.headers
        self._cutter = EventCutter(lines=kind == _LINES) if readable else None
        self._ends_with_done = ends_with_done and response.status == 200
        self._ended = False

    @property
    def is_stream(self) -> bool:
        """True if the answer consists of server-sent events or lines of JSON."""
        return self._cutter is not None

    @property
    def whole(self) -> bool:
        """True if `begin` returned the whole answer."""
        return self._ended and not self.is_stream

    @property
    def error_forwarded(self) -> bool:
        """True if the answer ended with an error event of the worker."""
        return self._cutter is not None and self._cutter.error_forwarded

    async def begin(self) -> bytes:
        """Return the first bytes. Raises `WorkerLost` if a stream ends without any, and `UPSTREAM_ERRORS`."""
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
        first = await read_up_to(content, _HELD_BYTES + 1)
        self._ended = len(first) <= _HELD_BYTES
        return first

    async def rest(self, silence: SilenceTimer) -> AsyncIterator[bytes]:
        """Yield the rest; `WorkerLost` if incomplete. `TimeoutError` of `silence` may be raised by the consumer."""
        cutter = self._cutter
        while not self._ended:
            silence.start()
            try:
                chunk = await self._response.content.readany()
                silence.stop()
            except UPSTREAM_ERRORS as error:
                if cutter is not None and self._ends_with_done and cutter.done:
                    self._ended = True  # only the end of the connection is missing
                    return
                raise WorkerLost from error
            if not chunk:
                self._ended = True
                break
            ready = chunk if cutter is None else cutter.push(chunk)
            if ready:
                yield ready
        if cutter is not None:
            if last := cutter.rest():
                yield last
            if self._ends_with_done and not cutter.done:
                raise WorkerLost


async def read_up_to(content: aiohttp.StreamReader, limit: int) -> bytes:
    """Return all of a body, or its first `limit` bytes."""
    parts: list[bytes] = []
    while limit > 0 and (part := await content.read(limit)):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def _index_after(data: bytes, mark: bytes) -> int:
    found = data.rfind(mark)
    return -1 if found < 0 else found + len(mark)


_RESETS: Final = frozenset({errno.ECONNRESET, errno.EPIPE})


class WorkerConnector(aiohttp.TCPConnector):
    """Skips pooled connections that the worker has closed and the event loop has not noticed yet."""

    async def _get(self, key: Any, traces: Any) -> Any:
        while (connection := await super()._get(key, traces)) is not None:
            if not _readable(connection.transport):
                return connection
            connection.close()
        return None


def _readable(transport: Any) -> bool:
    """Return True for an idle connection that has something to read: its end, as no answer is due."""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None or (number := sock.fileno()) < 0:
        return True
    poll = select.poll()
    poll.register(number, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(0))


def reuse_tracing() -> aiohttp.TraceConfig:
    """Return tracing that sets `reused` of a request's `trace_request_ctx` if it went over a pooled connection."""

    async def reused(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        asked = context.trace_request_ctx
        if asked is not None:
            asked.reused = True

    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(reused)
    return tracing


def was_stale(error: BaseException, asked: SimpleNamespace) -> bool:
    """Return True if a request failed because the worker had closed a pooled connection before it read the request.

    A system resets a connection whose program closed it with something unread. A worker that read the whole request
    and is lost then ends the connection without a reset, so no request that may have begun is sent again.
    """
    return asked.reused and isinstance(error, aiohttp.ClientOSError) and error.errno in _RESETS
