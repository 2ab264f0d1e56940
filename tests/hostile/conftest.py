"""Fixtures shared with the tests of the server."""

from __future__ import annotations

from tests.server.conftest import server, shared_server

__all__ = ["server", "shared_server"]
