from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.proxy import Proxy
from tests.faults.raw_stores import RawStore, in_folder, on_server

# The Redis plugin's test helpers start real servers; tests fail where none can be started.
sys.path.append(str(Path(__file__).parents[2] / "plugins" / "storage_redis" / "tests"))


@pytest.fixture
def start_redis() -> Iterator[Callable[..., Any]]:
    """Start Redis servers for fault injection."""
    from servers import Server

    servers = []

    def started(*options: str, **more: Any) -> Server:
        servers.append(Server(*options, **more))
        servers[-1].back_door.ping()  # opens its connection before open files are counted
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
    """File with the secret that all engines of a test share."""
    path = tmp_path / "secret"
    path.write_text("secret shared by the engines of this test")
    path.chmod(0o600)
    return path


@pytest.fixture(params=["redis", "disk"])
def raw_store(request: pytest.FixtureRequest, tmp_path: Path) -> RawStore:
    """Each kind of store that outlives an engine."""
    if request.param == "disk":
        return in_folder(tmp_path / "kv")
    return on_server(request.getfixturevalue("redis_server"))
