"""Connections to the server of a key: command batches within one deadline, and translation of failures.

A key's server is the single one, the primary of the Sentinels, or a node of a cluster.

Commands are sent without concatenating their parts, and replies arrive in order.

redis-py limits the time of each socket operation, but login, Sentinel queries, cluster discovery and long replies need
many operations. Here the deadline is in a context variable, and every operation gets the remaining time. DNS lookups of
the operating system are not limited.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

import redis.exceptions as failures
from fd_core.kv.stores.contract import Bytes, FailureReason, StoreError
from redis import Redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import AuthenticationError, AuthorizationError, BusyLoadingError, ConnectionError, ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from fd_storage_redis.settings import Address, Credentials, Settings, Topology

_OUTSIDE_CALLS: Final = 1.0
"""Timeout in seconds of an operation outside `within`."""

_deadline: ContextVar[float | None] = ContextVar("fd_storage_redis_deadline", default=None)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the total time of all socket operations in the context to `seconds`."""
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
        raise TimeoutError("the call timed out")
    return left


class _BoundedSocket:
    """A socket whose operations have the remaining time until the deadline."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self._polls = False

    def settimeout(self, value: float | None) -> None:
        # Zero polls for data; the deadline replaces any other limit.
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
    """Connects, sends and receives within the deadline; must be the first base class."""

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
    """A TCP connection to the primary of the Sentinels."""


class BoundedSentinelSSLConnection(_Bounded, SentinelManagedSSLConnection):
    """A TLS connection to the primary of the Sentinels."""


class BoundedPool(ConnectionPool):
    """A pool for the nodes of a cluster; it replaces redis-py's connection classes, which the cluster client names."""

    def __init__(self, connection_class: type[AbstractConnection] = Connection, **arguments: Any) -> None:
        bounded = BoundedSSLConnection if issubclass(connection_class, SSLConnection) else BoundedConnection
        super().__init__(connection_class=bounded, **arguments)


_LONGEST_TEXT: Final = 200
_SHORTEST_SECRET: Final = 4
"""A shorter secret is not masked: masking would show which letters it has."""

_CLASSES: Final[tuple[tuple[type[Exception], FailureReason], ...]] = (
    (failures.AuthenticationError, FailureReason.DENIED),
    (failures.AuthenticationWrongNumberOfArgsError, FailureReason.DENIED),
    (failures.AuthorizationError, FailureReason.DENIED),
    (failures.NoPermissionError, FailureReason.DENIED),
    (failures.OutOfMemoryError, FailureReason.FULL),
    (failures.ReadOnlyError, FailureReason.READ_ONLY),
    (failures.ClusterDownError, FailureReason.UNREACHABLE),
    (failures.SlotNotCoveredError, FailureReason.UNREACHABLE),
    (failures.ConnectionError, FailureReason.UNREACHABLE),
    (failures.TimeoutError, FailureReason.TIMEOUT),
    (TimeoutError, FailureReason.TIMEOUT),
    (OSError, FailureReason.UNREACHABLE),
)
"""Troubles by class of exception; the first that fits counts. `LOADING` is one of redis-py's connection errors."""

# A cluster node does not hold the key; only redis-py's cluster client has classes for these in all versions.
_ELSEWHERE: Final = ("MOVED", "ASK", "TRYAGAIN")

_CODES: Final = {
    "CLUSTERDOWN": FailureReason.UNREACHABLE,
    "MASTERDOWN": FailureReason.UNREACHABLE,
    # Snapshots cannot be written, usually because the disk is full: reads continue, writes are rejected.
    "MISCONF": FailureReason.READ_ONLY,
    "NOREPLICAS": FailureReason.READ_ONLY,
    # Protected mode.
    "DENIED": FailureReason.DENIED,
    "NOAUTH": FailureReason.DENIED,
    # A script blocks the server.
    "BUSY": FailureReason.TIMEOUT,
}


def store_error(failure: Exception, where: str, password: str | None = None) -> StoreError:
    """Return the error to raise for `failure` of the server `where`, with no `password` in its text."""
    cause: BaseException = failure
    while isinstance(cause, failures.RedisClusterException) and cause.__cause__ is not None:
        cause = cause.__cause__  # the cause of a failed cluster discovery
    text = " ".join(str(cause).split())[:_LONGEST_TEXT] or type(cause).__name__
    if password is not None and len(password) >= _SHORTEST_SECRET:
        text = text.replace(password, "***")
    return StoreError(_failure_reason(cause), f"{where}: {text}")


@contextmanager
def discovering() -> Iterator[None]:
    """Translate redis-py's exceptions for malformed replies of Sentinels or clusters, or host names, to
    `InvalidResponse`."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise failures.InvalidResponse(f"the reply has no server: {type(error).__name__}") from error


def passes_over(answer: object) -> bool:
    """Return True if a reply is an error of a single key, which then counts as absent."""
    return _code(answer) == "WRONGTYPE"


def is_elsewhere(answer: object) -> bool:
    """Return True if a cluster node replies that it does not hold the key, or not yet."""
    return isinstance(answer, (failures.AskError, failures.TryAgainError)) or _code(answer) in _ELSEWHERE


def _code(answer: object) -> str:
    return str(answer).partition(" ")[0] if isinstance(answer, failures.ResponseError) else ""


def _failure_reason(cause: BaseException) -> FailureReason:
    for cls, reason in _CLASSES:
        if isinstance(cause, cls):
            return reason
    return _CODES.get(_code(cause), FailureReason.OTHER)


Argument: TypeAlias = bytes | Sequence[Bytes]
"""One argument, whole or in parts."""
Command: TypeAlias = Sequence[Argument]

_SMALL: Final = 8 << 10
"""Parts up to this size in bytes are concatenated, because copying them costs less than a system call."""


def packed(commands: Iterable[Command]) -> list[Bytes]:
    """Return the buffers of `commands` in the Redis protocol; large parts are among them without a copy."""
    buffers: list[Bytes] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            parts = [memoryview(part) for part in ((argument,) if isinstance(argument, bytes) else argument)]
            small += b"$%d\r\n" % sum(part.nbytes for part in parts)
            for part in parts:
                if part.nbytes <= _SMALL:
                    small += part
                else:
                    buffers += [small, part]
                    small = bytearray()
            small += b"\r\n"
    return [*buffers, small]


def exchange(pool: ConnectionPool, commands: Sequence[Command]) -> list[Any]:
    """Return the reply to each command; error replies of the server are returned, not raised.

    A connection that breaks is replaced once: every command of a store can be repeated. Raises redis-py's errors; after
    one, the connection is closed, so that a late reply cannot be mistaken for another one.
    """
    try:
        return _attempt(pool, commands)
    except (AuthenticationError, AuthorizationError, BusyLoadingError):
        raise
    except ConnectionError:
        remaining()
        return _attempt(pool, commands)


def _attempt(pool: ConnectionPool, commands: Sequence[Command]) -> list[Any]:
    # The pool checks a connection and replaces one that the server closed meanwhile; Sentinels are queried here, too.
    with discovering():
        connection = pool.get_connection()
    try:
        connection.send_packed_command(packed(commands))
        return [_answer(connection) for _ in commands]
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response(disconnect_on_error=True)
    except ResponseError as refusal:
        return refusal


_READ_SIZE = 128 << 10


def routes_for(settings: Settings) -> Routes:
    """Return the routes for the settings, without connecting to anything."""
    if settings.topology is Topology.CLUSTER:
        return _ClusterRoutes(settings)
    if settings.topology is Topology.SENTINEL:
        sentinel = Sentinel([])
        asked = [_tcp_pool(address, settings, settings.sentinel_credentials) for address in settings.addresses]
        sentinel.sentinels = [Redis(connection_pool=pool) for pool in asked]
        cls = BoundedSentinelSSLConnection if settings.tls else BoundedSentinelConnection
        options = {"connection_class": cls, "db": settings.database, **_options(settings, settings.credentials)}
        return _SingleRoutes(SentinelConnectionPool(settings.master, sentinel, **options), *asked)
    if settings.topology is Topology.SERVER:
        return _SingleRoutes(_tcp_pool(settings.addresses[0], settings, settings.credentials, db=settings.database))
    options = {"path": settings.socket, "db": settings.database, **_options(settings, settings.credentials)}
    return _SingleRoutes(ConnectionPool(connection_class=BoundedUnixConnection, **options))


def _options(settings: Settings, credentials: Credentials) -> dict[str, Any]:
    """Return the common arguments of a pool's connections."""
    # Version 2 of the protocol suffices and saves a round trip per connection.
    options: dict[str, Any] = {"protocol": 2, "socket_read_size": _READ_SIZE, "encoding_errors": "replace"}
    options["max_connections"] = settings.max_connections
    if credentials.password is not None or credentials.file is not None:
        options["credential_provider"] = credentials
    if settings.tls:
        options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": settings.tls_ca}
        options |= {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}
    return options


def _tcp_pool(address: Address, settings: Settings, credentials: Credentials, **more: Any) -> ConnectionPool:
    cls = BoundedSSLConnection if settings.tls else BoundedConnection
    options = _options(settings, credentials) | more
    return ConnectionPool(connection_class=cls, host=address.host, port=address.port, **options)


class _SingleRoutes:
    """Maps keys to connection pools, here a single one. `others` are closed with it."""

    def __init__(self, pool: ConnectionPool, *others: ConnectionPool) -> None:
        self._pool, self._others = pool, others

    def groups(self, keys: Sequence[bytes]) -> list[tuple[ConnectionPool, list[int]]]:
        """Return each pool that holds some of `keys`, with the indices of those keys."""
        return [(self._pool, list(range(len(keys))))]

    def pools(self) -> list[ConnectionPool]:
        """Return the pool of every writable server."""
        return [self._pool]

    def refresh(self) -> None:
        """Drop the cached key locations, because a server failed or no longer holds them.

        A no-op for one pool: each new connection uses the one address or queries the Sentinels again.
        """

    def close(self) -> None:
        """Close the connections that are not in use."""
        for pool in (self._pool, *self._others):
            pool.disconnect(inuse_connections=False)


class _ClusterRoutes:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cluster: RedisCluster | None = None

    def groups(self, keys: Sequence[bytes]) -> list[tuple[ConnectionPool, list[int]]]:
        cluster = self._reached()
        found: dict[str, tuple[ConnectionPool, list[int]]] = {}
        for place, key in enumerate(keys):
            node = cluster.get_node_from_key(key)
            found.setdefault(node.name, (_pool_of(cluster, node), []))[1].append(place)
        return list(found.values())

    def pools(self) -> list[ConnectionPool]:
        cluster = self._reached()
        return [_pool_of(cluster, node) for node in cluster.get_primaries()]

    def refresh(self) -> None:
        self.close()

    def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            for node in cluster.get_nodes():
                if node.redis_connection is not None:
                    node.redis_connection.connection_pool.disconnect(inuse_connections=False)

    def _reached(self) -> RedisCluster:
        """Return the client, discovering the nodes on first use."""
        if self._cluster is None:
            settings = self._settings
            first = settings.addresses[0]
            with discovering():
                self._cluster = RedisCluster(
                    # Only clients created from a URL accept custom pools.
                    url=f"{'rediss' if settings.tls else 'redis'}://{first}",
                    startup_nodes=[ClusterNode(address.host, address.port) for address in settings.addresses[1:]],
                    retry=Retry(NoBackoff(), 0),
                    require_full_coverage=False,
                    connection_pool_class=BoundedPool,
                    **_options(settings, settings.credentials),
                )
        return self._cluster


Routes = _SingleRoutes | _ClusterRoutes


def _pool_of(cluster: RedisCluster, node: ClusterNode) -> ConnectionPool:
    return cluster.get_redis_connection(node).connection_pool
