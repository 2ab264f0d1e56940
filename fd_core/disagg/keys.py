"""Keys that router, prefill and decode workers derive from the secret that they share."""

from __future__ import annotations

from fd_core.kv.stores.secret import derive, load_secret

_FLAG = "--transfer-secret-file"


def ticket_key(file: str | None) -> bytes:
    """Return the key of tickets, see `ticket`; without a `file`, of this user's secret. Raises `ConfigError`."""
    return derive(load_secret(file, field=_FLAG), "prefill tickets")


def transfer_key(file: str | None) -> bytes:
    """Return the key that seals messages and pieces; without a `file`, of this user's secret. Raises `ConfigError`."""
    return derive(load_secret(file, field=_FLAG), "transfers")
