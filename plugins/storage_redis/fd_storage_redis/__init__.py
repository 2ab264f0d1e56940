"""KV stores in Redis and Valkey; importing this imports no client."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

__version__ = "0.2.0"

_STORE = "fd_storage_redis.store:RedisStore"


@hookimpl
def fd_register_stores() -> list[Entry]:
    """Register the store under the scheme of each kind of connection."""
    return [
        Entry("redis", _STORE, "a Redis or Valkey server"),
        Entry("rediss", _STORE, "a Redis or Valkey server through TLS"),
        Entry("valkey", _STORE, "the same as redis"),
        Entry("valkeys", _STORE, "the same as rediss"),
        Entry("unix", _STORE, "a Redis or Valkey server on a Unix socket"),
        Entry("redis+unix", _STORE, "the same as unix"),
        Entry("redis+sentinel", _STORE, "the primary of Redis Sentinels"),
        Entry("rediss+sentinel", _STORE, "the primary of Redis Sentinels, all through TLS"),
        Entry("redis+cluster", _STORE, "a Redis or Valkey cluster"),
        Entry("rediss+cluster", _STORE, "a Redis or Valkey cluster through TLS"),
    ]
