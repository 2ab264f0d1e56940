"""Accepting connections: as many as there is room for, others with a clear answer, and no spinning where it fails."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any, Final

from fd_core.http.connections.connections import Connections, WatchedProtocol
from fd_core.http.connections.tls import ServingTls
from fd_core.http.errors import unavailable

__all__ = ["Listener"]

_BACKLOG: Final = 1024
_AT_ONCE: Final = 64
"""Connections accepted before others have their turn on the event loop."""
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Closing connections that wait for a request may help."""
_PAUSE_SECONDS: Final = 0.5
"""Pause after a failure to accept: whatever is missing does not come back at once."""
_REFRESH_SECONDS: Final = 5.0
"""Pause between two looks at the files of the certificate."""
_REFUSAL_SECONDS: Final = 2.0
_MOST_REFUSALS: Final = 16
"""Refusals on their way, which take descriptors of the reserve; further connections are closed without a word."""


class Listener:
    """Serves a bound socket. Where too many connections are open, a new one is answered with 503."""

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], WatchedProtocol],
        connections: Connections,
        tls: ServingTls | None,
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
        sock.listen(_BACKLOG)
        self._listen()
        self._refreshing = self._loop.call_later(_REFRESH_SECONDS, self._refresh)

    def close(self) -> None:
        """Accept no more; connections go on."""
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
        """Wait for what `close` cancelled, and watch no longer."""
        await asyncio.gather(*self._openings, return_exceptions=True)
        self._connections.close()

    def _listen(self) -> None:
        self._again = None
        self._loop.add_reader(self._sock, self._accept)

    def _refresh(self) -> None:
        self._refreshing = self._loop.call_later(_REFRESH_SECONDS, self._refresh)  # first: the rest may fail
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
                self._connections.complain(f"a connection cannot be accepted: {(error.strerror or str(error)).lower()}")
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
        """Serve one connection, behind its TLS handshake if there is one."""
        secured: dict[str, Any] = {}
        if self._tls is not None:
            secured = {"ssl": self._tls.context, "ssl_handshake_timeout": self._connections.patience["head"]}
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted, **secured)
        except (OSError, asyncio.CancelledError):  # of which errors of TLS and timeouts are some
            accepted.close()
            self._connections.stats.handshakes_failed += self._tls is not None and not self._closed
            if isinstance(protocol, _Refusal):
                self._refusals.discard(protocol)
            else:
                self._connections.left(protocol)


class _Refusal(asyncio.Protocol):
    """Answers a connection for which there is no room, and takes what the client sends until it has read that."""

    def __init__(self, refusals: set[_Refusal]) -> None:
        self._refusals = refusals

    def connection_made(self, transport: Any) -> None:
        error = unavailable("too many connections are open; try again", "too_many_connections", retry_after=1)
        body = error.body()
        head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
        head += "".join(f"{name.lower()}: {value}\r\n" for name, value in error.headers.items())
        transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        if transport.can_write_eof():
            transport.write_eof()
        # Closed at once, unread bytes of the request would make the kernel throw the answer away.
        self._timer = asyncio.get_running_loop().call_later(_REFUSAL_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._refusals.discard(self)
