"""Transfer through a third party: values are in the KV store of `--kv-store` until the decode side has read them.

Each value has a separate key, derived from lease and index. The decode side deletes the values that it read and, on
close, all others of the lease; on close, the prefill side deletes all that it wrote. Values are only left over if both
sides or the store crash: at most `window` per lease, until the store evicts them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final

from fd_core.disagg.connectors import contract
from fd_core.errors import ConfigError
from fd_core.kv.stores.contract import MAX_KEY_BYTES, Deadline, StoreError

_GREETING: Final = -1
"""Index of the greeting, by which the prefill side checks that both workers use the same store."""
_GREETING_BYTES: Final = 16


class KVStoreConnector(contract.Connector):
    """Connector for workers with access to one store, on any host. Both need the same `--kv-store`."""

    name = "kv_store"

    def __init__(self, settings: contract.ConnectorSettings) -> None:
        super().__init__(settings)
        if settings.make_store is None:
            hint = "start both workers with the same --kv-store, such as redis://HOST:PORT/DB or disk:FOLDER"
            raise ConfigError("the connector kv_store needs a KV store", field="--kv-connector", hint=hint)
        store = settings.make_store()
        if not store.shared:
            store.close()
            raise ConfigError(
                f"the connector kv_store cannot use {store.location.shown}, which other processes cannot access",
                field="--kv-store",
                hint="start both workers with redis://HOST:PORT/DB or disk:FOLDER, or use another --kv-connector",
            )
        self._store = store
        # A store takes one reader and one writer at a time.
        self._reading, self._writing = threading.Lock(), threading.Lock()

    def open_inbox(self, lease: str, *, pieces: range, window: int, value_bytes: int) -> contract.KVInbox:
        """Put a greeting into the store and return an inbox that takes values from it."""
        return _KVStoreInbox(self, lease, pieces, window=window, value_bytes=value_bytes)

    def open_outbox(self, lease: str, address: bytes, *, window: int, value_bytes: int) -> contract.KVOutbox:
        """Check the inbox's greeting and return an outbox that writes to the store."""
        return _KVStoreOutbox(self, lease, address, value_bytes=value_bytes)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def put(self, key: bytes, parts: Sequence[contract.Bytes]) -> None:
        """Store a value. Raises `ConnectorError`, as `get` and `delete` do, if the store fails or times out."""
        with self._turn(self._writing) as seconds:
            if self._store.put([(key, parts)], seconds) != 1:
                raise contract.ConnectorError("the KV store has no space for a piece")

    def get(self, key: bytes, limit: int) -> contract.Bytes | None:
        """Return a value of at most `limit` bytes, None if there is none."""
        with self._turn(self._reading) as seconds:
            [value] = self._store.get([key], limit, seconds)
            return value

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete values."""
        with self._turn(self._writing) as seconds:
            self._store.delete(list(keys), seconds)

    @contextmanager
    def _turn(self, lock: threading.Lock) -> Iterator[float]:
        """Wait for the lock and yield the seconds that are left of the call."""
        deadline = Deadline(self.settings.timeout)
        if not lock.acquire(timeout=self.settings.timeout):
            raise contract.ConnectorError("the KV store call timed out")
        try:
            yield deadline.left
        except StoreError as error:
            raise contract.ConnectorError(f"a piece could not be moved through the KV store: {error}") from error
        finally:
            lock.release()


class _KVStoreInbox(contract.KVInbox):
    def __init__(self, store: KVStoreConnector, lease: str, pieces: range, window: int, value_bytes: int) -> None:
        self._store, self._lease, self._pieces, self._window = store, lease, pieces, window
        self._value_bytes = value_bytes
        self._closed = False
        self._known = 0
        """Number of leading `pieces` up to the last announced one."""
        self._done: list[int] = []
        """Indices that are done and whose values are not deleted yet."""
        self._deleted: set[int] = set()
        self.address = os.urandom(_GREETING_BYTES)
        store.put(_key(lease, _GREETING), [self.address])

    def take(self, index: int, reference: bytes, frames: Sequence[contract.Bytes]) -> contract.Bytes:
        if self._closed:
            raise contract.ConnectorError("the lease is over")
        if reference or frames or index not in self._pieces:
            raise contract.ConnectorError("a piece has a location that the connector kv_store does not use")
        self._known = max(self._known, self._pieces.index(index) + 1)
        value = self._store.get(_key(self._lease, index), self._value_bytes)
        if value is None:
            raise contract.ConnectorError("a piece is not in the KV store, or too long")
        return value

    def done(self, index: int, reference: bytes) -> None:
        self._done.append(index)
        if len(self._done) >= self._window:
            with contextlib.suppress(contract.ConnectorError):  # again at close
                self._store.delete(_key(self._lease, one) for one in self._done)
                self._deleted.update(self._done)
            self._done.clear()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Pieces are put in order, so fewer than `window` follow the last announced one.
        possible = set(self._pieces[: self._known + self._window]) - self._deleted
        with contextlib.suppress(contract.ConnectorError):
            self._store.delete(_key(self._lease, index) for index in (_GREETING, *sorted(possible)))


class _KVStoreOutbox(contract.KVOutbox):
    def __init__(self, store: KVStoreConnector, lease: str, address: bytes, value_bytes: int) -> None:
        self._store, self._lease, self._value_bytes = store, lease, value_bytes
        self._left = [_key(lease, _GREETING)]
        self._closed = False
        found = store.get(_key(lease, _GREETING), _GREETING_BYTES) if len(address) == _GREETING_BYTES else None
        if found is None or bytes(found) != address:
            message = "this worker's KV store does not hold the decode worker's greeting"
            raise contract.ConnectorError(message, hint="start both workers with the same --kv-store")

    def put(self, index: int, parts: Sequence[contract.Bytes]) -> contract.PutResult:
        if self._closed:
            raise contract.ConnectorError("the lease is over")
        flat, _ = contract.flat_parts(parts, self._value_bytes)
        key = _key(self._lease, index)
        self._left.append(key)  # even a call that fails may have stored it
        self._store.put(key, flat)
        return contract.PutResult(b"")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(contract.ConnectorError):
            self._store.delete(self._left)


def _key(lease: str, index: int) -> bytes:
    name = index.to_bytes(8, "little", signed=True) + lease.encode()
    return blake2b(name, digest_size=MAX_KEY_BYTES, person=b"fd_core pieces").digest()
