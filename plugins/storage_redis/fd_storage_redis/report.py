"""Facts that a server reports about itself, as far as the user may ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.connection import ConnectionPool

from fd_storage_redis.wire import exchange

__all__ = ["Report", "report_of"]


@dataclass(frozen=True, slots=True)
class Report:
    """Facts about one server; None where the server does not report one."""

    product: str
    """Name and version of the server."""
    values: int | None
    """Keys in the database, whoever wrote them."""
    used_bytes: int | None
    limit_bytes: int | None
    """Limit of the server's memory in bytes, 0 without a limit."""
    policy: str | None
    """What the server does when its memory is full: its `maxmemory-policy`."""


def report_of(pool: ConnectionPool) -> Report:
    """Ask a server for its facts, without those that it refuses. Raises redis-py's errors if it cannot be reached."""
    server, memory, size = exchange(pool, [(b"INFO", b"server"), (b"INFO", b"memory"), (b"DBSIZE",)])
    about, facts = _facts(server), _facts(memory)
    valkey = about.get("valkey_version")
    version = about.get("redis_version")
    return Report(
        product=f"Valkey {valkey}" if valkey else f"Redis {version}" if version else "a server",
        values=size if isinstance(size, int) else None,
        used_bytes=_number(facts.get("used_memory")),
        limit_bytes=_number(facts.get("maxmemory")),
        policy=facts.get("maxmemory_policy"),
    )


def _facts(answer: Any) -> dict[str, str]:
    if not isinstance(answer, bytes):
        return {}
    lines = answer.decode("utf-8", "replace").splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
