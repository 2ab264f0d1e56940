"""Finding the server of a key: the only one, the primary that Sentinels name, or a node of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import ConnectionPool
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from fd_storage_redis.settings import Address, Credentials, Settings, Topology
from fd_storage_redis.wire import (
    BoundedConnection,
    BoundedPool,
    BoundedSentinelConnection,
    BoundedSentinelSSLConnection,
    BoundedSSLConnection,
    BoundedUnixConnection,
    discovering,
)

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
    """Return what all connections of a pool have in common."""
    # Version 2 of the protocol has all that is needed and saves a round trip for each connection.
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_read_size": _READ_SIZE,
        "encoding_errors": "replace",
        "max_connections": settings.max_connections,
    }
    if credentials.password is not None or credentials.file is not None:
        options["credential_provider"] = credentials
    if settings.tls:
        options |= {
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_ca_certs": settings.tls_ca,
            "ssl_certfile": settings.tls_cert,
            "ssl_keyfile": settings.tls_key,
        }
    return options


def _tcp_pool(address: Address, settings: Settings, credentials: Credentials, **more: Any) -> ConnectionPool:
    cls = BoundedSSLConnection if settings.tls else BoundedConnection
    options = _options(settings, credentials) | more
    return ConnectionPool(connection_class=cls, host=address.host, port=address.port, **options)


class _SingleRoutes:
    """Finds the pool of connections for each key: here the only one. `others` are closed with it."""

    def __init__(self, pool: ConnectionPool, *others: ConnectionPool) -> None:
        self._pool, self._others = pool, others

    def groups(self, keys: Sequence[bytes]) -> list[tuple[ConnectionPool, list[int]]]:
        """Return each pool that holds some of `keys`, with the indices of those keys."""
        return [(self._pool, list(range(len(keys))))]

    def pools(self) -> list[ConnectionPool]:
        """Return the pool of every server that takes writes."""
        return [self._pool]

    def refresh(self) -> None:
        """Forget where keys are, because a server has failed or said that it no longer holds them.

        One pool knows no such thing: each new connection goes to the one address or asks the Sentinels anew.
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
        """Return the client, having discovered the nodes if that was not done yet."""
        if self._cluster is None:
            settings = self._settings
            first = settings.addresses[0]
            with discovering():
                self._cluster = RedisCluster(
                    # Only clients made from a URL let their pools be chosen.
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
