"""The answer of one worker: held back until its first bytes can be sent, then streamed as it arrives.

Of server-sent events and lines of JSON only whole ones are passed on, so that an error can follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from fd_core.router.gateway.http1.workers import UPSTREAM_ERRORS, WorkerAnswer

_HELD_BYTES: Final = 1 << 20
"""A JSON answer up to this size is buffered, so that the request can be retried if the worker is lost."""
_DONE: Final = b"[DONE]"
_MAX_HELD_BYTES: Final = 1 << 20
"""Larger events are passed on in pieces."""
_LINES: Final = "application/x-ndjson"
"""Content type of streams in Ollama's format."""


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
            if self._held:
                return self._pass(chunk)
            self._last = chunk[-4096:]
            return chunk
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
    """An answer whose headers have arrived. `begin` returns the first bytes to send, `more` all others."""

    def __init__(self, response: WorkerAnswer, *, ends_with_done: bool) -> None:
        """`ends_with_done`: a stream of this path is complete only with a last event that marks it as such."""
        self._response = response
        self._kind = kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        readable = kind in ("text/event-stream", _LINES) and "Content-Encoding" not in response.headers
        self._cutter = EventCutter(lines=kind == _LINES) if readable else None
        self.is_stream = readable
        """True if the answer consists of server-sent events or lines of JSON."""
        self.whole = False
        """True if `begin` returned the whole answer."""
        self.cut: Callable[[bytes], bytes] = bytes if self._cutter is None else self._cutter.push
        """Processes a chunk; returns the bytes that may be sent to the client."""
        self._ends_with_done = ends_with_done and response.status == 200
        self._ended = False

    @property
    def complete(self) -> bool:
        """True if all of the answer was returned, and nothing is missing."""
        return self._ended and (not self._ends_with_done or self._cutter is None or self._cutter.done)

    @property
    def error_forwarded(self) -> bool:
        """True if the answer ended with an error event of the worker."""
        return self._cutter is not None and self._cutter.error_forwarded

    async def begin(self) -> bytes:
        """Return the first bytes. Raises `WorkerLost` if a stream ends without any, and `UPSTREAM_ERRORS`."""
        response = self._response
        if self._cutter is not None:
            ready = b""
            while not ready and not self._ended:
                ready = self._cut(await response.readany())
            rest = self._rest()
            if not ready and not self.complete:
                raise WorkerLost
            return ready + rest
        if self._kind != "application/json":
            first = await response.readany()
            self._ended = self.whole = not first
            return first
        first = await response.read_up_to(_HELD_BYTES + 1)
        self._ended = self.whole = len(first) <= _HELD_BYTES
        return first

    async def more(self) -> bytes:
        """Return the next bytes, none at the end. Raises `WorkerLost` if the answer is incomplete."""
        while not self._ended:
            try:
                chunk = await self._response.readany()
            except UPSTREAM_ERRORS as error:
                if self._ends_with_done and self._cutter is not None and self._cutter.done:
                    self._ended = True  # only the end of the connection is missing
                    return b""
                raise WorkerLost from error
            if ready := self._cut(chunk) + self._rest():
                return ready
        if not self.complete:
            raise WorkerLost
        return b""

    def _cut(self, chunk: bytes) -> bytes:
        self._ended = self._response.ended
        return self.cut(chunk) if chunk else b""

    def _rest(self) -> bytes:
        return b"" if self._cutter is None or not self._ended else self._cutter.rest()


def _index_after(data: bytes, mark: bytes) -> int:
    found = data.rfind(mark)
    return -1 if found < 0 else found + len(mark)
