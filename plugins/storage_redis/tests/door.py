"""Direct access to the values of a server, without the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from fd_core.kv.stores.contract import FailureReason
from fd_core.testing.stores import BackDoor
from servers import Server


class Door(BackDoor):
    """The server's own commands."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = server.back_door

    def read(self, key: bytes) -> bytes | None:
        found = self._client.get(b"fd:" + key.hex().encode())
        return None if found is None else bytes(found)

    def write(self, key: bytes, value: bytes) -> None:
        self._client.set(b"fd:" + key.hex().encode(), value)

    def delete(self, key: bytes) -> None:
        self._client.delete(b"fd:" + key.hex().encode())

    def spoil(self, key: bytes) -> None:
        self.delete(key)
        self._client.lpush(b"fd:" + key.hex().encode(), "a list")

    def restart(self) -> None:
        self._server.restart()

    def fault(self, trouble: FailureReason) -> AbstractContextManager[object]:
        return {
            FailureReason.FULL: lambda: self._configured("maxmemory", "1"),
            FailureReason.READ_ONLY: lambda: self._configured("min-replicas-to-write", "1"),
            FailureReason.DENIED: lambda: self._configured("requirepass", "another"),
            FailureReason.TIMEOUT: self._server.frozen,
            FailureReason.UNREACHABLE: self._dead,
        }[trouble]()

    @contextmanager
    def _configured(self, name: str, value: str) -> Iterator[None]:
        before = self._client.config_get(name)[name]
        self._client.config_set(name, value)
        if name == "requirepass":
            # Close open connections, so that clients must authenticate again.
            self._client.client_kill_filter(_type="normal", skipme=True)
        try:
            yield
        finally:
            self._client.config_set(name, before)

    @contextmanager
    def _dead(self) -> Iterator[None]:
        self._server.kill()
        try:
            yield
        finally:
            self._server.start()
