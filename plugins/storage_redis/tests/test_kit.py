"""The store kit against a private server, through TCP and through its Unix socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from door import Door
from fd_core.testing.stores import BackDoor, StoreSuite, closed
from servers import Server

PASSWORD = "s3cr3t"


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    server = Server("--requirepass", PASSWORD, password=PASSWORD)
    yield server
    server.close()


class RedisSuite(StoreSuite):
    survives_restart = closed("the server of these tests keeps values in memory only")
    size_cap = closed("the limit is the server's own maxmemory")
    secrets = (PASSWORD,)

    def elsewhere(self, location: str) -> str:
        return f"{location.removesuffix('/0')}/1" if location.endswith("/0") else f"{location}?db=1"

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
    @pytest.fixture
    def location(self, own_server: Server) -> str:
        return f"unix://:{PASSWORD}@{own_server.socket}"
