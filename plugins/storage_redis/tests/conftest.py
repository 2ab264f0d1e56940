from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fd_core.kv.stores.location import parse_location
from servers import Script, Server

from fd_storage_redis.store import RedisStore


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server(shared_server: Server) -> Server:
    """Healthy, empty server."""
    shared_server.back_door.flushall()
    return shared_server


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Start servers for fault tests."""
    servers: list[Server] = []

    def started(*options: str, **more: Any) -> Server:
        servers.append(Server(*options, **more))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    scripts: list[Script] = []

    def started(answer: bytes, pause: float = 0.0) -> Script:
        scripts.append(Script(answer, pause))
        return scripts[-1]

    yield started
    for one in scripts:
        one.close()


@pytest.fixture
def store() -> Iterator[Callable[[str], RedisStore]]:
    """Create stores that are closed at the end."""
    stores: list[RedisStore] = []

    def made(text: str) -> RedisStore:
        stores.append(RedisStore(parse_location(text)))
        return stores[-1]

    yield made
    for one in stores:
        one.close()
