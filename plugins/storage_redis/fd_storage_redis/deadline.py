"""One deadline for everything that a call does on the network.

redis-py limits the time of each single operation on a socket, but logging in, asking Sentinels, discovering a cluster
and reading a long answer take many operations. Here the deadline travels in a context variable, and every operation
gets the time that is left. The operating system looks up host names, which no deadline can bound.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from redis.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

_OUTSIDE_CALLS: Final = 1.0
"""Seconds that an operation outside `within` may take."""

_deadline: ContextVar[float | None] = ContextVar("fd_storage_redis_deadline", default=None)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Bound all socket operations inside the context by `seconds` together."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def remaining() -> float:
    """Return the seconds until the deadline. Raises `TimeoutError` if it has passed."""
    deadline = _deadline.get()
    if deadline is None:
        return _OUTSIDE_CALLS
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the call's time is over")
    return left


class _BoundedSocket:
    """A socket whose operations each get the time that is left until the deadline."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self._polls = False

    def settimeout(self, value: float | None) -> None:
        # Zero asks whether there is something to read; the deadline replaces any other limit.
        self._polls = value == 0

    def recv_into(self, buffer: Any, *arguments: Any) -> int:
        self._inner.settimeout(0 if self._polls else remaining())
        return self._inner.recv_into(buffer, *arguments)

    def recv(self, *arguments: Any) -> bytes:
        self._inner.settimeout(0 if self._polls else remaining())
        return self._inner.recv(*arguments)

    def sendall(self, data: Any) -> None:
        # With TLS a single `sendall` starts its limit anew for each record.
        view = memoryview(data).cast("B")
        while view:
            self._inner.settimeout(remaining())
            view = view[self._inner.send(view) :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Bounded:
    """Connects, sends and receives within the deadline; has to be the first base class."""

    socket_timeout: float | None
    socket_connect_timeout: float | None

    def _connect(self) -> Any:
        self.socket_connect_timeout = self.socket_timeout = remaining()
        return _BoundedSocket(super()._connect())  # type: ignore[misc]  # the next base is a connection


class BoundedConnection(_Bounded, Connection):
    """A TCP connection within the deadline."""


class BoundedSSLConnection(_Bounded, SSLConnection):
    """A TLS connection within the deadline."""


class BoundedUnixConnection(_Bounded, UnixDomainSocketConnection):
    """A connection through a Unix socket within the deadline."""

    # redis-py reads both when a connection cannot be made in time.
    host = ""
    port = 0


class BoundedSentinelConnection(_Bounded, SentinelManagedConnection):
    """A TCP connection to the primary that Sentinels name."""


class BoundedSentinelSSLConnection(_Bounded, SentinelManagedSSLConnection):
    """A TLS connection to the primary that Sentinels name."""


class BoundedPool(ConnectionPool):
    """A pool for the nodes of a cluster; it replaces redis-py's connection classes, which the cluster client names."""

    def __init__(self, connection_class: type[AbstractConnection] = Connection, **arguments: Any) -> None:
        bounded = BoundedSSLConnection if issubclass(connection_class, SSLConnection) else BoundedConnection
        super().__init__(connection_class=bounded, **arguments)
