from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.places import Place, in_folder, on_server
from tests.faults.proxy import Proxy

# The helpers of the Redis plugin's own tests start real servers; where there is none to start, they fail.
sys.path.append(str(Path(__file__).parents[2] / "plugins" / "storage_redis" / "tests"))


@pytest.fixture
def start_redis() -> Iterator[Callable[..., Any]]:
    """Start servers to be mistreated."""
    from servers import Server

    servers = []

    def started(*options: str, **more: Any) -> Server:
        servers.append(Server(*options, **more))
        servers[-1].back_door.ping()  # its connection is open from the start, for tests that count open files
        return servers[-1]

    yield started
    for server in servers:
        server.close()


@pytest.fixture
def redis_server(start_redis: Callable[..., Any]) -> Any:
    return start_redis("--maxmemory-policy", "noeviction")


@pytest.fixture
def proxy(redis_server: Any) -> Iterator[Proxy]:
    between = Proxy(redis_server.port)
    yield between
    between.close()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The file with the secret that all engines of a test share."""
    path = tmp_path / "secret"
    path.write_text("a secret of all engines of this test")
    path.chmod(0o600)
    return path


@pytest.fixture(params=["redis", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of store that outlives an engine."""
    if request.param == "disk":
        return in_folder(tmp_path / "kv")
    return on_server(request.getfixturevalue("redis_server"))
