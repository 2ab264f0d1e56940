"""The gateway's HTTP client: pooled connections to workers, and answers that are read as they arrive."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import httptools

from fd_core.http.connections.connections import MAX_HEAD_BYTES
from fd_core.router.gateway.http1.heads import Headers, read_headers, request_head

UPSTREAM_ERRORS: Final = OSError
"""Exceptions that a request to a worker may raise; `TimeoutError` is one of them."""
_PAUSE_BYTES: Final = 128 * 1024
"""Unread bytes of an answer from which on nothing more is received."""
_IDLE_SECONDS: Final = 3.0
"""Connections that were idle for longer are closed."""
_RESOLVED_SECONDS: Final = 30.0
"""Time for which the addresses of a name are used."""
_RESETS: Final = frozenset({errno.ECONNRESET, errno.EPIPE})
_RESOURCE_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of the system for lack of descriptors, memory or ports."""
_BODYLESS: Final = ("GET", "HEAD", "DELETE", "OPTIONS")


class WorkerUnreachable(OSError):
    """No connection to a worker could be made."""


class InvalidAnswer(OSError):
    """A worker ended its answer early, or it is not HTTP/1.1."""


def is_resource_exhaustion(error: BaseException) -> bool:
    """Return True if no connection could be made for lack of local resources, which is not the worker's fault."""
    return isinstance(error, OSError) and error.errno in _RESOURCE_ERRNOS


class WorkerAnswer:
    """Answer of a worker, whose body may still arrive. To be closed; a complete one leaves its connection reusable."""

    __slots__ = (
        "_error",
        "_waiter",
        "connection",
        "direct",
        "ended",
        "forwards",
        "headers",
        "method",
        "parts",
        "passes",
        "status",
        "unread",
        "waits_since",
    )

    def __init__(self, connection: WorkerConnection, method: str, *, forwards: bool) -> None:
        """`forwards`: the request is a client's."""
        self.connection = connection
        self.method = method
        self.forwards = forwards
        self.passes = False
        """True once parts of it were sent to the client."""
        self.status = 0
        """0 until the head has arrived."""
        self.headers: Headers
        self.unread = 0
        """Bytes that were received and not read."""
        self.ended = False
        self.direct: Callable[[bytes], bool] | None = None
        """Takes what was read while the reader waits, without waking it; False if it cannot take it now."""
        self.waits_since: float | None = None
        """Time since which the worker is awaited, by the loop's clock; None while it is not."""
        self.parts: list[bytes] = []
        """Of the body, received and not read."""
        self._error: OSError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def readany(self) -> bytes:
        """Return what arrived of the body, nothing at its end. Raises `UPSTREAM_ERRORS`."""
        while not self.parts and not self.ended:
            await self.wait()
        return self._take()

    def _take(self) -> bytes:
        parts, self.parts, self.unread = self.parts, [], 0
        if self.connection.paused:
            self.connection.regulate(self)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read_up_to(self, limit: int) -> bytes:
        """Return all of the body, or its first `limit` bytes; nothing else is read then. Raises `UPSTREAM_ERRORS`."""
        if self.ended and self.unread <= limit:
            return self._take()
        parts: list[bytes] = []
        while limit > 0 and (self.parts or not self.ended) and (part := await self.readany()):
            parts.append(part[:limit])
            if len(part) > limit:
                self.parts.insert(0, part[limit:])
            limit -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def wait(self) -> asyncio.Future[None]:
        """Return a future that is done once something arrives. Raises `UPSTREAM_ERRORS`."""
        if self._error is not None:
            raise self._error
        loop = self.connection.loop
        self._waiter, self.waits_since = loop.create_future(), loop.time()
        return self._waiter

    def arrived(self) -> None:
        """Hand over what has arrived: directly, unless the answer has ended, or by waking the reader."""
        direct = None if self.waits_since is None or self.ended else self.direct
        if direct is not None and self.parts and direct(b"".join(self.parts)):
            self.parts.clear()
            self.unread, self.waits_since = 0, self.connection.loop.time()
        else:
            self.wake()

    def wake(self) -> None:
        """Continue the reader."""
        if self.waits_since is not None and self._waiter is not None:
            self.waits_since = None
            if not self._waiter.done():
                self._waiter.set_result(None)

    def fail(self, error: OSError) -> None:
        """End the answer with an error, after what has arrived."""
        if not self.ended and self._error is None:
            self._error = error
            self.connection.abandon()
            self.wake()

    def close(self) -> None:
        """Abort the answer unless it is complete."""
        self.direct = None
        if not self.ended:
            self.connection.abandon()

    async def __aenter__(self) -> WorkerAnswer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class _Address:
    """Base address of a worker, and idle connections to it."""

    def __init__(self, url: str, tls: ssl.SSLContext | Literal[True]) -> None:
        parsed = urlsplit(url)
        self.host, secure = parsed.hostname or "", parsed.scheme == "https"
        self.port = parsed.port or (443 if secure else 80)
        self.path = parsed.path
        self.tls = (ssl.create_default_context() if tls is True else tls) if secure else None
        self.named = parsed.netloc
        self.idle: list[WorkerConnection] = []
        self._resolved: tuple[float, list[Any]] = -_RESOLVED_SECONDS, []

    async def connect(self, make: Callable[[], WorkerConnection]) -> WorkerConnection:
        """Return a new connection. Raises `WorkerUnreachable`."""
        loop, error = asyncio.get_running_loop(), OSError("the name has no address")
        name = None if self.tls is None else self.host
        try:
            resolved, found = self._resolved
            if loop.time() - resolved >= _RESOLVED_SECONDS:
                found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
                self._resolved = loop.time(), found
            for *_, address in found:
                try:
                    _, connection = await loop.create_connection(
                        make, address[0], address[1], ssl=self.tls, server_hostname=name
                    )
                except OSError as failure:
                    error = failure
                else:
                    return connection
        except (OSError, UnicodeError) as failure:
            error = failure if isinstance(failure, OSError) else OSError("the host name is not valid")
        self._resolved = -_RESOLVED_SECONDS, []
        reason = error.strerror or str(error)
        if error.errno is not None and not isinstance(error, ssl.SSLError | socket.gaierror):
            reason = os.strerror(error.errno).lower()
        raise WorkerUnreachable(error.errno, f"Cannot connect to host {self.host}:{self.port}: {reason}") from error


class WorkerClient:
    """Sends requests to workers; used on one event loop."""

    def __init__(self, tls: ssl.SSLContext | Literal[True], *, connect_seconds: float, read_seconds: float) -> None:
        """`tls`: context for https, True for the system's; `read_seconds`: time for which a worker may be silent."""
        self._tls = tls
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self._addresses: dict[str, _Address] = {}
        self._answers: dict[WorkerAnswer, str] = {}
        """Answers that have not ended, with the addresses of their workers."""
        self._loop = asyncio.get_running_loop()
        self._pause = min(1.0, read_seconds / 4)
        self._timer = self._loop.call_later(self._pause, self._check)

    async def request(
        self,
        method: str,
        url: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        forwards: bool = False,
    ) -> WorkerAnswer:
        """Return an answer whose head has arrived; `url` is a base address, `target` the encoded path and query.

        A connection that the worker closed while it was idle is replaced. A system resets a connection whose program
        closed it with something unread. A worker that read the whole request and is lost then ends the connection
        without a reset, so no request that may have begun is sent again. Raises `UPSTREAM_ERRORS`.
        """
        address = self._addresses.get(url)
        if address is None:
            address = self._addresses[url] = _Address(url, self._tls)
        length = None if not body and method in _BODYLESS else len(body)
        head = request_head(method, address.path + target, address.named, headers, length)
        while True:
            connection = self._idle(address)
            reused = connection is not None
            if connection is None:
                async with asyncio.timeout(self._connect_seconds):
                    connection = await address.connect(lambda: WorkerConnection(self._answers, address.idle))
            answer = connection.answer = WorkerAnswer(connection, method, forwards=forwards)
            self._answers[answer] = url
            connection.send(head, body)
            try:
                while not answer.status:
                    await answer.wait()
            except OSError as error:
                answer.close()
                if not reused or error.errno not in _RESETS:
                    raise
            except BaseException:
                answer.close()
                raise
            else:
                return answer

    def _idle(self, address: _Address) -> WorkerConnection | None:
        while address.idle:
            connection = address.idle.pop()
            if self._loop.time() - connection.idle_since < _IDLE_SECONDS and not connection.has_input():
                return connection
            connection.transport.abort()
        return None

    def expire_first_bytes(self, url: str) -> int:
        """End every wait of clients for the first bytes of a worker, so that others are tried; return their number."""
        return self._expire(lambda answer: answer.forwards and not answer.passes, url, 0.0)

    def expire_streams(self, url: str, silence: float) -> int:
        """End every begun answer whose worker was silent for `silence` seconds; return their number."""
        return self._expire(lambda answer: answer.forwards and answer.passes, url, silence)

    def _expire(self, chosen: Callable[[WorkerAnswer], bool], url: str | None, silence: float) -> int:
        now = self._loop.time()
        found = [
            each
            for each, its in self._answers.items()
            if each.waits_since is not None
            and now - each.waits_since >= silence
            and url in (None, its)
            and chosen(each)
        ]
        for answer in found:
            answer.fail(TimeoutError("the worker was silent for too long"))
        return len(found)

    def _check(self) -> None:
        self._timer = self._loop.call_later(self._pause, self._check)
        self._expire(lambda _: True, None, self._read_seconds)
        before = self._loop.time() - _IDLE_SECONDS
        for address in self._addresses.values():
            for connection in [each for each in address.idle if each.idle_since < before]:
                connection.transport.abort()
                address.idle.remove(connection)

    def close(self) -> None:
        """Close all connections."""
        self._timer.cancel()
        for answer in [*self._answers]:
            answer.close()
        for address in self._addresses.values():
            for connection in address.idle:
                connection.transport.abort()


class WorkerConnection(asyncio.Protocol):
    """Connection to a worker, for one request after the other."""

    def __init__(self, answers: dict[WorkerAnswer, str], idle: list[WorkerConnection]) -> None:
        """Answers that ended leave `answers`; the connection enters `idle` whenever it is reusable."""
        self.loop = asyncio.get_running_loop()
        self.answer: WorkerAnswer | None = None
        self.idle_since = 0.0
        self._answers = answers
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self._poll: select.poll | None = None
        self.paused = False
        self._has_news = False
        """True if a head, a part of a body or its end arrived for the reader of the answer."""
        self._unreported = 0
        """Bytes since the end of a head or a part of a body."""

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self.transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            self._poll = select.poll()
            self._poll.register(sock.fileno(), select.POLLIN | select.POLLHUP)

    def has_input(self) -> bool:
        """Return True if the idle connection has something to read: its end, as no answer is due."""
        return self._poll is None or self.transport.is_closing() or bool(self._poll.poll(0))

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request."""
        self._lines: list[tuple[bytes, bytes]] = []
        self._until_closed = self._interim = False
        self.transport.write(head + body)

    def regulate(self, answer: WorkerAnswer) -> None:
        """Receive no more than the client of the answer takes."""
        pauses = answer.unread > _PAUSE_BYTES
        if pauses != self.paused and answer is self.answer and not self.transport.is_closing():
            self.paused = pauses
            (self.transport.pause_reading if pauses else self.transport.resume_reading)()

    def abandon(self) -> None:
        """Close the connection, with its answer."""
        self._end(complete=False)
        self.transport.abort()

    def _end(self, *, complete: bool) -> None:
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.ended = complete
            self._answers.pop(answer, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer; one without a length is complete."""
        if self in self._idle:
            self._idle.remove(self)
        if (answer := self.answer) is None:
            return
        if exc is None and self._until_closed:
            self._end(complete=True)
            answer.wake()
        else:
            lost = exc if isinstance(exc, OSError) else InvalidAnswer("the worker closed the connection")
            answer.fail(lost)

    def data_received(self, data: bytes) -> None:
        """Parse."""
        self._unreported += len(data)
        answer = self.answer
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("the worker's answer is not HTTP/1.1")
        if self._unreported > MAX_HEAD_BYTES:
            self._fail("the head of the worker's answer is too large")
        if answer is not None and self._has_news:
            self._has_news = False
            answer.arrived()
            if answer.unread > _PAUSE_BYTES:
                self.regulate(answer)

    def _fail(self, reason: str) -> None:
        if self.answer is not None:
            self.answer.fail(InvalidAnswer(reason))
        else:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Reject an answer without a request."""
        if self.answer is None:
            raise InvalidAnswer

    def on_header(self, name: bytes, value: bytes) -> None:
        """Process a header; those of a trailer are dropped."""
        if self.answer is not None and not self.answer.status:
            self._lines.append((name, value))

    def on_headers_complete(self) -> None:
        """Hand over the head."""
        answer, status = self.answer, self._parser.get_status_code()
        if answer is None or status == 101:
            raise InvalidAnswer
        self._interim = status < 200
        if self._interim:
            self._lines.clear()
            return
        self._unreported = 0
        answer.headers = headers = read_headers(self._lines)
        answer.status = status
        self._until_closed = "Content-Length" not in headers and "Transfer-Encoding" not in headers
        if answer.method == "HEAD":
            self._end(complete=True)
            self.transport.abort()  # the parser expects a body
        self._has_news = True

    def on_body(self, part: bytes) -> None:
        """Process a part of the body."""
        self._unreported = 0
        answer = self.answer
        if answer is not None:
            answer.parts.append(part)
            answer.unread += len(part)
            self._has_news = True

    def on_message_complete(self) -> None:
        """Complete the answer; its connection is free."""
        if self._interim or self.answer is None:
            return
        self._end(complete=True)
        self._has_news = True
        if self._parser.should_keep_alive() and not self.transport.get_write_buffer_size():
            if self.paused:
                self.paused = False
                self.transport.resume_reading()
            self._unreported = 0
            self.idle_since = self.loop.time()
            self._idle.append(self)
        else:
            self.transport.abort()
