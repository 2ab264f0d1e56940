"""The connector kit, with NIXL over TCP on the loopback."""

from __future__ import annotations

from fd_core.testing.connectors import ConnectorSuite
from needs import needs_nixl


@needs_nixl
class TestNixl(ConnectorSuite):
    connector = "nixl"
    timeout = 3.0  # several timeouts for a piece whose sender is dead
