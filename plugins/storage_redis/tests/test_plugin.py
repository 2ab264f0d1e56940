"""Discovery of the store by the core."""

from __future__ import annotations

import subprocess
import sys

from fd_core.plugins import STORE, Plugins

from fd_storage_redis.store import RedisStore


def test_every_scheme_is_offered_by_the_installed_plugin() -> None:
    plugins = Plugins.discover()
    offered = {
        name for name, entry in plugins.offered(STORE).items() if entry.origin.distribution == "fd-storage-redis"
    }
    assert offered >= {"redis", "rediss", "unix", "redis+unix", "redis+sentinel", "redis+cluster", "valkey", "valkeys"}
    assert all(plugins.load(STORE, name) is RedisStore for name in offered)


def test_discovery_imports_no_client() -> None:
    code = "import sys, fd_storage_redis; fd_storage_redis.fd_register_stores(); sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
