"""HTTP/1.1 by hand, for both ends: a general library would take more time than the routers that are measured."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from dataclasses import dataclass
from typing import cast

HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"


def content_length(head: bytes) -> int:
    """Return the content length in a lower-case head; 0 if it has none."""
    at = head.find(b"\r\ncontent-length:")
    return int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


def dechunked(buffer: bytes | bytearray, at: int) -> tuple[bytes, int] | None:
    """Return the chunked body that begins at `at`, and where it ends; None if it is not complete."""
    parts = []
    while True:
        line = buffer.find(b"\r\n", at)
        if line < 0:
            return None
        size = int(bytes(buffer[at:line]).split(b";")[0], 16)
        start, at = line + 2, line + 2 + size + 2
        if len(buffer) < at:
            return None
        if not size:
            return b"".join(parts), at
        parts.append(bytes(buffer[start : start + size]))


def request(method: str, path: str, body: bytes = b"", session: str | None = None) -> bytes:
    """Return a request as it is sent."""
    more = f"X-Session-Id: {session}\r\n" if session else ""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(frozen=True, slots=True)
class Answer:
    """One response, with its times."""

    status: int
    body: bytes
    first_s: float
    """Seconds from the request to the first byte of the body."""
    end_s: float

    @property
    def events(self) -> int:
        """Number of server-sent events in the body."""
        return self.body.count(b"data: ")


class Connection(asyncio.Protocol):
    """A client's connection: one request at a time.

    With `quick_acks` it acknowledges every packet at once. Otherwise Linux waits up to 40 ms for something to send
    along, and a sender that does not set TCP_NODELAY waits for that before its next small packet.
    """

    def __init__(self, *, quick_acks: bool = False) -> None:
        self._quick_acks = quick_acks
        self._answer: asyncio.Future[Answer] | None = None
        self._transport: asyncio.Transport

    @classmethod
    async def to(cls, port: int, *, quick_acks: bool = False) -> Connection:
        """Connect to a port of this machine."""
        make = functools.partial(cls, quick_acks=quick_acks)
        _, made = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own are not derived from it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("closed before the answer ended"))

    async def ask(self, data: bytes) -> Answer:
        """Send a request; return its whole answer. Raises OSError where the connection ends before."""
        self._buffer = bytearray()
        self._body_at = -1
        self._first = 0.0
        self._answer = asyncio.get_running_loop().create_future()
        self._start = time.perf_counter()
        self._transport.write(data)
        return await self._answer

    def close(self) -> None:
        """End it."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Record the first byte of the body, and whether the body is complete."""
        if self._quick_acks:  # the kernel forgets it again
            self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        self._buffer += data
        buffer = self._buffer
        if self._body_at < 0:
            end = buffer.find(HEAD_END)
            if end < 0:
                return
            self._body_at = end + len(HEAD_END)
            head = bytes(buffer[:end]).lower()
            self._status = int(head[9:12])
            self._chunked = b"transfer-encoding: chunked" in head
            self._size = content_length(head)
        if not self._first and len(buffer) > self._body_at:
            self._first = time.perf_counter()
        if self._chunked:
            # The line break in front of the last chunk belongs to the chunk before it, or to the head.
            if buffer.endswith(_LAST_CHUNK):
                found = dechunked(buffer, self._body_at)
                if found is not None:
                    self._end(found[0])
        elif len(buffer) >= self._body_at + self._size:
            self._end(bytes(buffer[self._body_at :]))

    def _end(self, body: bytes) -> None:
        now = time.perf_counter()
        assert self._answer is not None
        if not self._answer.done():
            first = self._first or now
            self._answer.set_result(Answer(self._status, body, first - self._start, now - self._start))
