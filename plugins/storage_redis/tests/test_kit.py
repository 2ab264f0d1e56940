"""The store kit against a server of its own, through TCP and through its Unix socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from fd_core.kv.stores.contract import Trouble
from fd_core.testing.stores import BackDoor, StoreSuite, closed
from servers import Server

PASSWORD = "s3cr3t"


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

    def fault(self, trouble: Trouble) -> AbstractContextManager[object]:
        return {
            Trouble.FULL: lambda: self._configured("maxmemory", "1"),
            Trouble.READ_ONLY: lambda: self._configured("min-replicas-to-write", "1"),
            Trouble.DENIED: lambda: self._configured("requirepass", "another"),
            Trouble.TIMEOUT: self._server.frozen,
            Trouble.UNREACHABLE: self._dead,
        }[trouble]()

    @contextmanager
    def _configured(self, name: str, value: str) -> Iterator[None]:
        before = self._client.config_get(name)[name]
        self._client.config_set(name, value)
        if name == "requirepass":
            # Who is in already stays in; everybody has to knock again.
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


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    server = Server("--requirepass", PASSWORD, password=PASSWORD)
    yield server
    server.close()


class RedisSuite(StoreSuite):
    survives_restart = closed("the server of these tests keeps values in memory only")
    size_cap = closed("the limit is the server's own maxmemory")
    secrets = (PASSWORD,)

    @pytest.fixture(autouse=True)
    def _empty(self, own_server: Server) -> None:
        own_server.back_door.flushall()

    @pytest.fixture
    def back_door(self, own_server: Server) -> BackDoor:
        return Door(own_server)


class TestThroughTCP(RedisSuite):
    @pytest.fixture
    def location(self, own_server: Server) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{own_server.port}/0"


class TestThroughUnixSocket(RedisSuite):
    examples = 5

    @pytest.fixture
    def location(self, own_server: Server) -> str:
        return f"unix://:{PASSWORD}@{own_server.socket}"
