"""The gateway's HTTP server on connections with timeouts and limits."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final
from urllib.parse import quote, unquote

import httptools
import msgspec
from multidict import CIMultiDict

from fd_core.http.connections.connections import MAX_HEAD_BYTES, Connections, Listener, WatchedProtocol
from fd_core.http.connections.tls import ServingTls
from fd_core.http.errors import ApiError, to_api_error
from fd_core.http.hosts import Visit
from fd_core.router.gateway.http1.heads import Headers, answer_head, read_headers

_PAUSE_BYTES: Final = 128 * 1024
"""Unread bytes of a body from which on nothing more is received."""
_LINGER_SECONDS: Final = 2.0
"""Time for a client to finish a body that was not needed: closed at once, it might lose the answer."""


class WholeAnswer(msgspec.Struct, eq=False):
    """Answer in one piece."""

    status: int
    body: bytes = b""
    headers: Headers = msgspec.field(default_factory=CIMultiDict)


def json_answer(value: Any, status: int = 200) -> WholeAnswer:
    """Return a value as JSON."""
    return WholeAnswer(status, msgspec.json.encode(value), CIMultiDict({"Content-Type": "application/json"}))


def error_answer(error: ApiError, path: str) -> WholeAnswer:
    """Return an error in the format of the API at `path`."""
    headers = CIMultiDict({"Content-Type": "application/json", **error.headers})
    return WholeAnswer(error.status, error.body_at(path), headers)


class ClientRequest:
    """One request of a client, whose body may still arrive, and the answer to it while it is streamed."""

    __slots__ = (
        "_chunked",
        "_expects",
        "_failed",
        "_head",
        "_parts",
        "_recent",
        "_waiter",
        "authority",
        "complete",
        "connection",
        "headers",
        "keep_alive",
        "method",
        "path",
        "started",
        "target",
        "unread",
    )

    def __init__(
        self, connection: ClientConnection, method: str, target: bytes, headers: Headers, *, recent: bool, lasts: bool
    ) -> None:
        """`recent`: of HTTP/1.1; `lasts`: more may follow it. Raises `httptools.HttpParserInvalidURLError`."""
        text = target.decode(errors="replace")
        self.authority: str | None = None
        """Host of an absolute target, which overrides the header (RFC 9112, section 3.2.2)."""
        if text[0] != "/" and text != "*":
            parsed = httptools.parse_url(target)
            host = (parsed.host or b"").decode(errors="replace")
            self.authority = f"[{host}]" if ":" in host else host
            text = ((parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")).decode(errors="replace")
        path, mark, query = text.partition("#")[0].partition("?")
        self.path = unquote(path) if "%" in path else path
        # The authorized path is the one sent on: encoded paths are not decoded twice.
        self.target = (path if path is self.path and path.isascii() else quote(self.path)) + mark + query
        """Path and query, for the request to a worker."""
        self.method = method
        self.headers = headers
        self.keep_alive = recent and lasts
        """False if the connection ends with the answer."""
        self.complete = False
        """True if the whole body was received."""
        self.started = False
        """True once some of the answer was sent."""
        self.unread = 0
        """Bytes of the body that were received and not read."""
        self.connection = connection
        self._parts: list[bytes] = []
        self._failed = False
        self._waiter: asyncio.Future[None] | None = None
        self._expects = headers.get("Expect", "").lower() == "100-continue"
        self._recent = recent
        self._chunked = False
        self._head = b""
        """Of the streamed answer, until its first piece is sent."""

    @property
    def remote(self) -> str:
        """Address of the client."""
        return self.connection.remote

    def visit(self) -> Visit:
        """Return the host and the origin of the request."""
        hosts = self.headers.getall("Host", []) if self.authority is None else [self.authority]
        return Visit.of(self.method, hosts, self.connection.local, self.headers.get)

    async def readany(self) -> bytes:
        """Return what arrived of the body, nothing at its end. Raises `ApiError` (400) if it is wrongly framed."""
        if not self._parts and not self.complete:
            if self._expects:
                self._expects = False
                self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waiter = self.connection.loop.create_future()
            await self._waiter
        if self._failed:
            raise ApiError(400, "the body is incomplete or wrongly framed", code="invalid_body")
        parts, self._parts, self.unread = self._parts, [], 0
        if self.connection.paused:
            self.connection.regulate()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def has_more(self) -> bool:
        """True unless the whole body was read."""
        return bool(self._parts) or not self.complete or self._failed

    def received(self, part: bytes) -> None:
        """Process a piece of the body."""
        self._parts.append(part)
        self.unread += len(part)
        if self._waiter is not None:
            self._wake()

    def completed(self, *, failed: bool = False) -> None:
        """Process the end of the body; `failed`: the rest of it cannot be read."""
        self.complete, self._failed = True, failed
        self.keep_alive &= not failed
        if self._waiter is not None:
            self._wake()

    def drop(self) -> None:
        """Drop what was received and not read."""
        self._parts, self.unread = [], 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def begin(self, status: int, headers: Mapping[str, str], length: int | None) -> None:
        """Begin to stream the answer; its head is sent with its first piece. Without `length` it ends with its last."""
        framing = "" if length is None else f"Content-Length: {length}\r\n"
        if length is None and self._recent:
            self._chunked, framing = True, "Transfer-Encoding: chunked\r\n"
        elif length is None:
            self.keep_alive = False
        self._head = self._begun(status, headers, framing)

    def put(self, piece: bytes, *, last: bool = False) -> None:
        """Send a piece of the answer, with its head and its end where they are due: each system call takes 10 us."""
        if self.method == "HEAD":
            piece, last = b"", False
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else piece
            piece = piece + b"0\r\n\r\n" if last else piece
        if self._head:
            piece, self._head = self._head + piece, b""
        if piece:
            self.connection.transport.write(piece)

    async def write(self, piece: bytes, *, last: bool = False) -> None:
        """Send a piece of the answer, and wait until there is room for more. Raises `ConnectionError`: client left."""
        self.put(piece, last=last)
        if self.connection.full is not None:
            await self.connection.full.wait()
        if self.connection.transport.is_closing():
            raise ConnectionResetError("the client disconnected")

    def abort(self) -> None:
        """Close the connection, so that the client notices that its answer is incomplete."""
        self.keep_alive = False
        self.connection.transport.close()

    def send(self, answer: WholeAnswer) -> None:
        """Send a whole answer."""
        framing = "" if answer.status in (204, 304) else f"Content-Length: {len(answer.body)}\r\n"
        head = self._begun(answer.status, answer.headers, framing)
        self.connection.transport.write(head if self.method == "HEAD" else head + answer.body)

    def _begun(self, status: int, headers: Mapping[str, str], framing: str) -> bytes:
        """Note that the answer begins; return its head."""
        self.started = True
        # A client that waits for permission may send the body nevertheless, or the next request.
        self.keep_alive &= self.connection.persists and (self.complete or not self._expects)
        if not self.keep_alive:
            framing += "Connection: close\r\n"
        return answer_head(status, headers, framing)


Handler = Callable[[ClientRequest], Awaitable[WholeAnswer]]


class GatewayHttp:
    """Serves a bound socket. A client that leaves cancels the handler of its request."""

    def __init__(
        self, handler: Handler, sock: socket.socket, connections: Connections, tls: ServingTls | None = None
    ) -> None:
        """Begin to listen; raises `OSError` if the address is in use."""
        self._open: set[ClientConnection] = set()
        make = partial(ClientConnection, handler, connections, self._open)
        self._listener = Listener(sock, make, connections, tls=tls)

    async def close(self, seconds: float) -> None:
        """Stop listening, with a grace period for answers in transit."""
        self._listener.close()
        await asyncio.sleep(0)  # start requests that have arrived before idle connections are closed
        for connection in [*self._open]:
            connection.close_when_idle()
        running = [each.task for each in self._open if each.task is not None]
        if running:
            await asyncio.wait(running, timeout=seconds)
        for connection in [*self._open]:
            connection.transport.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._listener.wait_closed()


class ClientConnection(WatchedProtocol):
    """Connection of a client: requests are answered one after the other."""

    def __init__(self, handler: Handler, watch: Connections, group: set[ClientConnection]) -> None:
        """`group`: the open connections of the listener."""
        self.watch = watch
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None
        """Handles the request that is answered now."""
        self.persists = True
        """False once the server closes: no further request is served."""
        self._handler = handler
        self._group = group
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        """Received part of the target of the next request, as `_lines` is of its headers."""
        self._lines: list[tuple[bytes, bytes]] = []
        self._receiving: ClientRequest | None = None
        self._queue: deque[ClientRequest] = deque()
        """Pipelined requests."""
        self.full: asyncio.Event | None = None
        """While the client has to read more of its answer before it is continued: set once it has."""
        self.paused = False
        self._deaf = False
        """True if further input is ignored."""
        self._lingering: asyncio.TimerHandle | None = None
        """Closes the connection, unless the rest of a body arrives whose request was answered."""
        self._error: ApiError | None = None
        """Answer to invalid input, after all others."""
        self._unreported = 0
        """Bytes since the end of a head or a part of a body: those of a head, or of a trailer."""

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        super().connection_made(transport)
        self.transport = transport
        peer, local = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self.remote = peer[0] if isinstance(peer, tuple) else "-"
        self.local = local[0] if isinstance(local, tuple) else None
        self._group.add(self)

    def connection_lost(self, exc: Any) -> None:
        """Cancel the handler of the request."""
        super().connection_lost(exc)
        self._group.discard(self)
        self._queue.clear()
        self.resume_writing()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        """Let the answer wait for the client."""
        super().pause_writing()
        self.full = asyncio.Event()

    def resume_writing(self) -> None:
        """Continue the answer."""
        super().resume_writing()
        if self.full is not None:
            self.full.set()
            self.full = None

    def regulate(self) -> None:
        """Receive only what can be processed soon."""
        pauses = bool(self._queue) or (self._receiving is not None and self._receiving.unread > _PAUSE_BYTES)
        if pauses != self.paused and not self.transport.is_closing():
            self.paused = pauses
            (self.transport.pause_reading if pauses else self.transport.resume_reading)()

    def data_received(self, data: bytes) -> None:
        """Parse; the parser bounds nothing, so what it does not report is counted."""
        super().data_received(data)
        if self._deaf:
            return
        self._unreported += len(data)
        try:
            self._parser.feed_data(self.without_upgrade(data))
        except httptools.HttpParserError as error:
            self._refuse(error.__context__ if isinstance(error.__context__, ApiError) else None)
        else:
            if self._unreported > MAX_HEAD_BYTES:
                self._refuse(self.head_too_large())
            if self.paused or self._queue or (self._receiving is not None and self._receiving.unread > _PAUSE_BYTES):
                self.regulate()

    def _refuse(self, error: ApiError | None) -> None:
        """Process nothing else; a request with an invalid body gets its own answer."""
        self._deaf = True
        if self._receiving is not None:
            self._receiving.completed(failed=True)
            self._end_of_body(self._receiving)
        elif self.task is not None:
            self._error = error or self.not_http()
        else:
            self.end(error or self.not_http())

    def on_url(self, url: bytes) -> None:
        """Process a part of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Process a header; those of a trailer are dropped."""
        if self._receiving is None:
            self._lines.append((name, value))

    def on_headers_complete(self) -> None:
        """Begin to answer, or queue the request. Raises `ApiError` for a head that is not accepted."""
        self._unreported = 0
        if len(self._target) + 4 * len(self._lines) + sum(map(len, chain.from_iterable(self._lines))) > MAX_HEAD_BYTES:
            raise self.head_too_large()
        if self._parser.should_upgrade():  # CONNECT
            raise self.not_http()
        self._receiving = request = ClientRequest(
            self,
            self._parser.get_method().decode(),
            self._target,
            read_headers(self._lines),
            recent=self._parser.get_http_version() == "1.1",
            lasts=self._parser.should_keep_alive(),
        )
        self._target, self._lines = b"", []
        self.head_complete()
        if self.task is None:
            self.task = self.loop.create_task(self._answer(request))
        else:
            self._queue.append(request)

    def on_body(self, part: bytes) -> None:
        """Process a part of a body."""
        self._unreported = 0
        if self._receiving is not None and self._lingering is None:
            self._receiving.received(part)

    def on_message_complete(self) -> None:
        """Process the end of a request."""
        self._unreported = 0
        if self._receiving is not None:
            self._receiving.completed()
            self._end_of_body(self._receiving)

    def _end_of_body(self, request: ClientRequest) -> None:
        self._receiving = None
        self.body_complete()
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
            self._go_on(request)

    async def _answer(self, request: ClientRequest) -> None:
        try:
            answer = await self._handler(request)
        except Exception as error:  # noqa: BLE001  # the outermost handler
            answer = error_answer(to_api_error(error), request.path)
        if not request.started:
            request.send(answer)
        if self.full is not None:
            await self.full.wait()
        if self.transport.is_closing():
            return
        self.task = None
        self.answer_complete()
        self._go_on(request)

    def _go_on(self, request: ClientRequest) -> None:
        """Process what follows an answered request."""
        if not request.complete:
            request.drop()
            self._lingering = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
            self.regulate()
        elif not request.keep_alive or not self.persists:
            self.transport.close()
        elif self._queue:
            self.task = self.loop.create_task(self._answer(self._queue.popleft()))
            self.regulate()
        elif self._error is not None:
            self.end(self._error)

    def close_when_idle(self) -> None:
        """Close after the current answer."""
        self.persists = False
        if self.task is None:
            self.transport.close()
