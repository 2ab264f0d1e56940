"""The connections of one listening socket: a limit on their number, and timeouts for idle ones.

GET /health has a separate port and thread as well: a busy event loop does not delay it, and a stuck one shows.

A connection waits for a request, receives a body, or is answered; only the generation of an answer has no deadline.

    WAITING --head is complete--> BODY --body is complete--> ANSWERING --answer is sent--> WAITING
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import itertools
import logging
import re
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec

from fd_core.config import ListenConfig
from fd_core.http.access.control import AccessControl
from fd_core.http.connections.listening import bind_socket, hangup_reloads, signals_stop
from fd_core.http.connections.tls import ServingTls
from fd_core.http.errors import ApiError, HealthAnswer, unavailable
from fd_core.http.hosts import is_loopback
from fd_core.http.supervision import Supervisor
from fd_core.types.metrics import counter, gauge

log = logging.getLogger(__name__)

Reason = Literal["head", "keep_alive", "body", "write", "crowd"]

MAX_HEAD_BYTES: Final = 64 * 1024
"""Most bytes of the request line and headers of a request; libraries may count each line, or up to one read more."""
BYTES_PER_SECOND: Final = 64 * 1024
"""Bytes that extend the deadline by a second: received of a body, or accepted by the client of an answer."""
_UPGRADE: Final = re.compile(rb"^upgrade:", re.IGNORECASE | re.MULTILINE)
"""Header that requests a protocol upgrade, as Java's client does."""
_RESERVED_DESCRIPTORS: Final = 256
"""Reserved for files, stores, workers and the engine; a quarter of a small limit is reserved."""
_MOST_CONNECTIONS: Final = 10_000
_CROWD_SECONDS: Final = 1.0
"""A connection idle for longer than this is closed for a new one if the limit is reached."""
_AT_ONCE: Final = 64
"""Connections accepted before the event loop runs other callbacks."""
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Closing connections that wait for a request may help."""
_PAUSE_SECONDS: Final = 0.5
"""Pause after a failure to accept: a missing resource is not available again at once."""
_REFRESH_SECONDS: Final = 5.0
"""Interval between polls of the certificate files."""
_MOST_REFUSALS: Final = 16
"""Rejections in progress, which use reserved descriptors; further connections are closed without a response."""
_BEAT_SECONDS: Final = 0.25
_STUCK_SECONDS: Final = 10.0
"""Heartbeat timeout of an event loop, after which it is stuck; no request may block it for a tenth of a second."""
_PROBE_SECONDS: Final = 2.0
_MOST_PROBES: Final = 64


class ConnectionStats(msgspec.Struct):
    """Outcomes of connections; every count only grows."""

    open: Annotated[int, gauge("connections", "Open connections of clients.")] = 0
    limit: Annotated[int, gauge("connections_limit", "Limit of open connections of clients.")] = 0
    closed: Annotated[
        dict[str, int],
        counter(
            "connections_closed",
            "Connections closed because they were idle, or to make room for others.",
            label="reason",
            values=("head", "keep_alive", "body", "write", "crowd"),
        ),
    ] = msgspec.field(default_factory=Counter)
    refused: Annotated[int, counter("connections_refused", "Connections rejected because too many were open.")] = 0
    refused_of_address: Annotated[
        int, counter("connections_refused_of_address", "Connections rejected because their address had too many open.")
    ] = 0
    accept_errors: Annotated[
        int, counter("accept_errors", "Failures to accept a connection, such as for lack of file descriptors.")
    ] = 0
    handshakes_failed: Annotated[int, counter("tls_handshakes_failed", "Connections whose TLS handshake failed.")] = 0


def connection_limit(config: ListenConfig, *, descriptors: int = 1) -> int:
    """Return the most connections: a setting, or what the descriptor limit allows with `descriptors` for each."""
    if config.limit_concurrency is not None:
        return config.limit_concurrency
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(1, min(_MOST_CONNECTIONS, (allowed - min(_RESERVED_DESCRIPTORS, allowed // 4)) // descriptors))


def last_answer(status: int, body: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Return a JSON response that ends a connection without the application."""
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    head += "".join(f"{name.lower()}: {value}\r\n" for name, value in headers.items())
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@lru_cache(maxsize=4096)
def source_of(address: str) -> str:
    """Return the source of an address: for IPv6 its /64 network, since one machine may use all addresses in it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 6 and not parsed.is_loopback:
        parsed = parsed.ipv4_mapped or ipaddress.IPv6Address(int(parsed) >> 64 << 64)
    return str(parsed)


class Connections:
    """The open connections of one listening socket."""

    def __init__(self, config: ListenConfig, limit: int) -> None:
        self.limit = limit
        self.limit_of_address = config.limit_concurrency_per_address or limit - limit // 4
        """Connections by address, except addresses of this machine, where proxies may run."""
        self.timeouts: dict[Reason, float] = {
            "head": config.timeout_headers,
            "keep_alive": config.timeout_keep_alive,
            "body": config.timeout_body,
            "write": config.timeout_write,
        }
        """Timeouts of connections without progress, in seconds, by wait reason."""
        self.stats = ConnectionStats(limit=limit)
        self._opening: set[WatchedProtocol] = set()
        """Accepted connections whose TLS handshake is in progress."""
        self._open: set[WatchedProtocol] = set()
        self._sources: Counter[str] = Counter()
        self.waiting: dict[WatchedProtocol, float] = {}
        """Idle connections with the start of their idle time, the longest idle first."""
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        """Returns seconds of the event loop's clock."""
        self._pause = min(1.0, min(self.timeouts.values()) / 4)
        self._timer = self._loop.call_later(self._pause, self._check_timeouts)
        self._next_line: dict[str, float] = {}

    def close(self) -> None:
        """Stop monitoring; connections are unchanged."""
        self._timer.cancel()

    def entered(self, connection: WatchedProtocol) -> None:
        """Record that a connection was made; it waits for its first request."""
        self._opening.discard(connection)
        self._open.add(connection)
        self.stats.open = len(self._open)
        self.waiting[connection] = self.now()

    def left(self, connection: WatchedProtocol) -> None:
        """Forget a connection; idempotent."""
        if connection not in self._open and connection not in self._opening:
            return
        self._opening.discard(connection)
        self._open.discard(connection)
        self.stats.open = len(self._open)
        self.waiting.pop(connection, None)
        self._sources[connection.source] -= 1
        if not self._sources[connection.source]:
            del self._sources[connection.source]

    def admit(self, address: str, make: Callable[[], WatchedProtocol]) -> WatchedProtocol | None:
        """Return the protocol of a new connection, for which an idle one may be closed; None if there is no room."""
        source, most = source_of(address), self.limit_of_address
        if self._sources[source] >= most and not is_loopback(source):
            self.stats.refused_of_address += 1
            self.complain(
                f"{most} connections from one address are open, further ones get 503; see "
                "--limit-concurrency-per-address",
                f"; the first such address is {source}",
            )
            return None
        if len(self._open) + len(self._opening) >= self.limit and not self.evict(1):
            self.stats.refused += 1
            self.complain(f"{self.limit} connections are open, further ones get 503; see --limit-concurrency")
            return None
        connection = make()
        connection.source = source
        self._sources[source] += 1
        self._opening.add(connection)
        return connection

    def evict(self, most: int) -> int:
        """Close up to `most` idle connections, the longest idle first; return their number."""
        now = self.now()
        longest = [each for each in itertools.islice(self.waiting, most) if now - self.waiting[each] > _CROWD_SECONDS]
        for connection in longest:
            connection.expire("crowd")
        return len(longest)

    def complain(self, what: str, example: str = "") -> None:
        """Log a warning, the same one at most once a minute, even with another `example`."""
        if (now := self.now()) >= self._next_line.get(what, 0.0):
            self._next_line[what] = now + 60.0
            log.warning("%s%s (logged once a minute)", what, example)

    def _check_timeouts(self) -> None:
        now = self.now()
        for connection in [*self._open]:
            reason = connection.overdue(now, self._pause)
            if reason is not None:
                connection.expire(reason)
        self._timer = self._loop.call_later(self._pause, self._check_timeouts)


class WatchedProtocol(asyncio.Protocol):
    """Base of watched protocols, before the class that parses HTTP, which reports ends of heads, bodies and answers."""

    watch: Connections
    """Must be set before the connection is made."""
    source: str
    """Source of the connection, see `source_of`; `Connections.admit` sets it."""

    def connection_made(self, transport: Any) -> None:
        """Start monitoring."""
        self._transport = transport
        self._waits_for: Literal["head", "keep_alive", "body"] | None = "head"
        self._since = self.watch.now()
        self._received = 0
        self._pending = 0
        self._stuck_since: float | None = None
        self._stuck_bytes = 0
        self.watch.entered(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Any) -> None:
        """Stop monitoring."""
        self.watch.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Record progress of the connection."""
        if self._waits_for == "keep_alive":
            self._waits_for, self._since = "head", self.watch.now()
        elif self._waits_for == "body":
            self._received += len(data)
        super().data_received(data)

    def pause_writing(self) -> None:
        """Record that the client does not read its answer."""
        self._stuck_since, self._stuck_bytes = self.watch.now(), self._transport.get_write_buffer_size()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Record that the client has read its answer."""
        self._stuck_since = None
        super().resume_writing()

    def head_complete(self) -> None:
        """Record that a request begins."""
        self._waits_for, self._since, self._received = "body", self.watch.now(), 0
        self._pending += 1
        self.watch.waiting.pop(self, None)

    def body_complete(self) -> None:
        """Record that the request is complete."""
        self._waits_for = None
        if not self._pending:
            self._wait()

    def answer_complete(self) -> None:
        """Record that the answer was handed over; the rest of an unfinished body keeps its deadline."""
        self._pending -= 1
        if not self._pending and self._waits_for is None:
            self._wait()

    def _wait(self) -> None:
        self._waits_for, self._since = "keep_alive", self.watch.now()
        self.watch.waiting[self] = self._since

    def overdue(self, now: float, elapsed: float) -> Reason | None:
        """Return the reason if a timeout expired; `elapsed` seconds have passed since the last check."""
        timeouts = self.watch.timeouts
        if self._stuck_since is None and self._transport.is_closing():
            self._stuck_since, self._stuck_bytes = now, self._transport.get_write_buffer_size()
        if self._stuck_since is not None:
            taken = max(0, self._stuck_bytes - self._transport.get_write_buffer_size())
            if now - self._stuck_since > timeouts["write"] + taken / BYTES_PER_SECOND:
                return "write"
        waits_for = self._waits_for
        if waits_for is None:
            return None
        if waits_for == "body" and not self._transport.is_reading():
            self._since += elapsed  # the server delays the client, not vice versa
        return waits_for if now - self._since > timeouts[waits_for] + self._received / BYTES_PER_SECOND else None

    def without_upgrade(self, data: bytes) -> bytes:
        """Return input in which a head requests no other protocol: the parser would drop the body of such a request."""
        if self._waits_for == "body":
            return data
        head, end, rest = data.partition(b"\r\n\r\n")
        return _UPGRADE.sub(b"x-upgrade:", head) + end + rest if b"pgrade:" in head else data

    def not_http(self) -> ApiError:
        """Log input that is not HTTP, and return the error for it."""
        self.watch.complain("a client sent data that is not HTTP")
        return ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http")

    def head_too_large(self) -> ApiError:
        """Return the response to a head that is larger than `MAX_HEAD_BYTES`."""
        return ApiError(431, f"the request line and headers exceed {MAX_HEAD_BYTES:,} bytes")

    def end(self, error: ApiError) -> None:
        """Answer with an error, without the application, and close."""
        self._transport.write(last_answer(error.status, error.body()))
        self._transport.close()

    def expire(self, reason: Reason) -> None:
        """Close the connection and drop unsent data; the handler of its request is notified of the disconnect."""
        self.watch.stats.closed[reason] += 1
        self.watch.left(self)
        self._transport.abort()


class Listener:
    """Serves a bound socket. If too many connections are open, a new one gets a 503."""

    def __init__(
        self, sock: socket.socket, make: Callable[[], WatchedProtocol], connections: Connections, tls: ServingTls | None
    ) -> None:
        """`make` returns the protocol of a new connection. Call this on the event loop; it begins at once."""
        self._sock = sock
        self._make = make
        self._connections = connections
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._openings: set[asyncio.Task[None]] = set()
        self._refusals: set[_Refusal] = set()
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        sock.setblocking(False)
        sock.listen(1024)
        self._listen()
        self._refreshing = self._loop.call_later(_REFRESH_SECONDS, self._refresh)

    def close(self) -> None:
        """Stop accepting connections; open ones continue."""
        if self._closed:
            return
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        self._refreshing.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for task in self._openings:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait for the tasks that `close` cancelled, and stop watching."""
        await asyncio.gather(*self._openings, return_exceptions=True)
        self._connections.close()

    def _listen(self) -> None:
        self._again = None
        self._loop.add_reader(self._sock, self._accept)

    def _refresh(self) -> None:
        self._refreshing = self._loop.call_later(_REFRESH_SECONDS, self._refresh)  # first, because the rest may fail
        if self._tls is not None:
            self._tls.refresh()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._connections.stats.accept_errors += 1
                self._connections.complain(f"accepting a connection failed: {(error.strerror or str(error)).lower()}")
                self._loop.remove_reader(self._sock)
                evicted = error.errno in _EXHAUSTED and self._connections.evict(_AT_ONCE)
                self._again = self._loop.call_later(0.0 if evicted else _PAUSE_SECONDS, self._listen)
                return
            protocol: WatchedProtocol | _Refusal | None = self._connections.admit(address[0], self._make)
            if protocol is None and len(self._refusals) < _MOST_REFUSALS:
                protocol = _Refusal(self._refusals)
                self._refusals.add(protocol)
            if protocol is None:
                accepted.close()
                continue
            accepted.setblocking(False)
            task = self._loop.create_task(self._open(accepted, protocol))
            self._openings.add(task)
            task.add_done_callback(self._openings.discard)

    async def _open(self, accepted: socket.socket, protocol: WatchedProtocol | _Refusal) -> None:
        secured: dict[str, Any] = {}
        if self._tls is not None:
            secured = {"ssl": self._tls.context, "ssl_handshake_timeout": self._connections.timeouts["head"]}
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted, **secured)
        except (OSError, asyncio.CancelledError):  # which includes TLS errors and timeouts
            accepted.close()
            self._connections.stats.handshakes_failed += self._tls is not None and not self._closed
            if isinstance(protocol, _Refusal):
                self._refusals.discard(protocol)
            else:
                self._connections.left(protocol)


class _Refusal(asyncio.Protocol):
    """Rejects a connection beyond the limit, and discards the client's input until it has read the response."""

    def __init__(self, refusals: set[_Refusal]) -> None:
        self._refusals = refusals

    def connection_made(self, transport: Any) -> None:
        error = unavailable("too many connections are open; retry later", "too_many_connections", retry_after=1)
        transport.write(last_answer(error.status, error.body(), error.headers))
        if transport.can_write_eof():
            transport.write_eof()
        # If closed at once, unread bytes of the request would make the kernel discard the response.
        self._timer = asyncio.get_running_loop().call_later(2.0, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._refusals.discard(self)


@contextlib.contextmanager
def attended(
    config: ListenConfig,
    access: AccessControl,
    supervisor: Supervisor,
    *,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    dead: Callable[[], str],
) -> Iterator[None]:
    """Handle signals for the block, reload the keys on SIGHUP, and serve the health port, see `liveness`."""
    reload = access.reload if access.reloadable else None
    with signals_stop(stop, hurry), hangup_reloads(reload, supervisor), liveness(config, dead):
        yield


@contextlib.contextmanager
def liveness(config: ListenConfig, dead: Callable[[], str]) -> Iterator[None]:
    """Serve /health on `config.health_port`, if set; `dead` returns why the server is dead. Raises `ConfigError`."""
    if config.health_port is None:
        yield
        return
    with bind_socket(config.host, config.health_port, flag="--health-port") as sock:
        server = _Liveness(sock, dead)
        log.info("/health is also served on port %d", sock.getsockname()[1])
        try:
            yield
        finally:
            server.close()


class _Liveness:
    """A thread with a separate event loop, and a heartbeat on the loop of the server."""

    def __init__(self, sock: socket.socket, dead: Callable[[], str]) -> None:
        sock.listen()  # at once, so that no client is rejected before the thread runs
        self._sock = sock
        self._dead = dead
        self._open = 0
        self._server_loop = asyncio.get_running_loop()
        self._beat()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fdcore-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._timer.cancel()
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_PROBE_SECONDS)

    def _beat(self) -> None:
        self._last = time.monotonic()
        self._timer = self._server_loop.call_later(_BEAT_SECONDS, self._beat)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._answer, sock=self._sock, limit=4096):
            await self._ended.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _MOST_PROBES:
                async with asyncio.timeout(_PROBE_SECONDS):
                    line = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0]
                    writer.write(self._response(line))
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # such clients get no response
        finally:
            self._open -= 1
            writer.close()

    def _response(self, line: bytes) -> bytes:
        method, _, path = line.partition(b" ")
        if path.partition(b" ")[0].partition(b"?")[0] not in (b"/health", b"/ping") or method not in (b"GET", b"HEAD"):
            status, answer = 404, HealthAnswer("not found", "this port only serves GET /health")
        else:
            silent = time.monotonic() - self._last
            reason = self._dead() if silent < _STUCK_SECONDS else f"the event loop has been blocked for {silent:.0f} s"
            status, answer = 503 if reason else 200, HealthAnswer("dead" if reason else "ok", reason or None)
        body = msgspec.json.encode(answer)
        whole = last_answer(status, body)
        return whole.removesuffix(body) if method == b"HEAD" else whole
