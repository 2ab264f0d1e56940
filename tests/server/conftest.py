"""One server for all tests of a module that do not change its setup."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.conftest import faults  # noqa: F401 - a fixture
from tests.server.fakes import FakeClient, LiveServer, live


@pytest.fixture(scope="module")
def shared_server() -> Iterator[LiveServer]:
    with live() as running:
        yield running


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """A server whose engine replies "Hello, world!"; changes of a test to the engine are reverted."""
    fresh = shared_server.call(FakeClient)
    client = shared_server.client
    names = ("reply", "step_seconds", "per_step", "held", "pause_after", "fail_after", "cached_tokens", "activity")

    def reset() -> None:
        for name in names:
            setattr(client, name, getattr(fresh, name))
        client.specs.clear()
        client.aborts.clear()

    shared_server.call(reset)
    yield shared_server
    shared_server.call(reset)
