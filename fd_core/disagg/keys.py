"""Keys that router, prefill and decode workers derive from the secret that they share."""

from __future__ import annotations

from pathlib import Path

from fd_core.disagg.ticket import PURPOSE
from fd_core.kv.stores.secret import derive, load_secret

__all__ = ["ticket_key", "transfer_key"]

_FLAG = "--transfer-secret-file"


def ticket_key(file: str | None) -> bytes:
    """Return the key of tickets, see `ticket`; without a `file`, of this user's own secret. Raises `ConfigError`."""
    return derive(_secret(file), PURPOSE)


def transfer_key(file: str | None) -> bytes:
    """Return the key that seals messages and pieces; without a `file`, of this user's secret. Raises `ConfigError`."""
    return derive(_secret(file), "transfers")


def _secret(file: str | None) -> bytes:
    return load_secret(Path(file) if file else None, field=_FLAG)
