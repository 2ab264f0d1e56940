"""KV transfer from a prefill worker to a decode worker, through a server."""

from __future__ import annotations

import pytest
from fd_core.testing.connectors import ConnectorSuite
from servers import Server


class TestThroughRedis(ConnectorSuite):
    connector = "kv_store"
    examples = 5

    @pytest.fixture
    def kv_store(self, server: Server) -> str:
        self.back_door = server.back_door
        return server.url

    def left_behind(self, kv_store: str | None) -> set[str]:
        return {key.hex() for key in self.back_door.scan_iter()}
