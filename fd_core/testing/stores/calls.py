"""Values, limits and waits that the cases of the store kit share."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fd_core.kv.stores.contract import Bytes, KVStore, StoreError

LIMIT = 720 * 1024 + 64
"""Bytes of a block's KV in its envelope: a size that real values have."""
TIMEOUT = 10.0
"""Seconds for a call that should succeed, even on a busy machine."""
SLACK = 1.5
"""Seconds by which a call may be late on a busy machine."""

_RECOVERY_SECONDS = 15.0


def key_of(number: int) -> bytes:
    """Return one of many different keys, 16 bytes as block keys have."""
    return number.to_bytes(2, "big") * 8


def value_of(key: bytes, length: int = 1000) -> bytes:
    """Return the value of a key: `length` bytes that no other key's value has."""
    return (key * (length // len(key) + 1))[:length]


def as_bytes(values: Iterable[Bytes | None]) -> list[bytes | None]:
    """Return what a store answered as plain bytes."""
    return [None if value is None else bytes(value) for value in values]


def usable_again(store: KVStore) -> None:
    """Wait until the store answers again after a fault or a restart; fails after 15 seconds."""
    end = time.monotonic() + _RECOVERY_SECONDS
    while True:
        try:
            store.get([b"is anybody there"], LIMIT, TIMEOUT)
        except StoreError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return
