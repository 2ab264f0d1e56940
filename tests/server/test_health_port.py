"""/health on a separate port and thread, of servers and of routers."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from fd_core.config import ServerConfig
from fd_core.errors import ConfigError
from fd_core.http.connections import connections
from tests.hostile.endpoints import KINDS, Endpoint, Hostile, endpoint, until
from tests.server.fakes import live
from tests.server.processes import free_port

both = pytest.mark.parametrize("kind", KINDS)


def ask(port: int, line: str = "GET /health") -> tuple[int, bytes]:
    with Hostile(port) as connection:
        status, _, body = connection.head(line).answer()
        return status, body


def hold(opened: Endpoint, seconds: float) -> None:
    """Block the event loop for a while; return at once."""
    opened.loop.call_soon_threadsafe(time.sleep, seconds)
    time.sleep(0.05)


@both
@pytest.mark.timing
def test_health_is_answered_while_the_event_loop_is_busy(kind: str) -> None:
    port = free_port()
    with endpoint(kind, health_port=port) as opened:
        assert ask(port) == (200, b'{"status":"ok","reason":null}')
        hold(opened, 1.5)
        begun = time.monotonic()
        assert ask(port)[0] == 200
        answered = time.monotonic() - begun
        assert opened.get("/health")[0] == 200
        assert answered < time.monotonic() - begun - 0.3, "the probe waited for the event loop"


@both
@pytest.mark.timing
def test_stuck_event_loop_fails_the_health_check(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_STUCK_SECONDS", 0.6)
    port = free_port()
    with endpoint(kind, health_port=port) as opened:
        hold(opened, 3.0)
        until(lambda: ask(port)[0] == 503, 2.5)
        status, body = ask(port)
        assert status == 503 and "event loop has been blocked" in json.loads(body)["reason"]
        until(lambda: ask(port)[0] == 200)


def test_dead_engine_fails_the_health_check() -> None:
    port = free_port()
    with live(health_port=port) as server:
        server.call(server.client.die)
        assert ask(port) == (503, b'{"status":"dead","reason":"the engine is not running"}')


@pytest.mark.timing
def test_other_requests_and_idle_connections_do_not_block_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PROBE_SECONDS", 0.5)
    port = free_port()
    with live(health_port=port), ExitStack() as stack:
        assert ask(port, "GET /ping?x=1")[0] == 200
        assert ask(port, "GET /metrics")[0] == ask(port, "POST /health")[0] == 404
        for _ in range(20):
            stack.enter_context(Hostile(port))
        assert ask(port)[0] == 200
        for rest in ("x" * 10_000, "GET /health HTTP/1.1\r\n"):
            stack.enter_context(Hostile(port)).send(rest).closed_within(5)
        for _ in range(connections._MOST_PROBES):
            stack.enter_context(Hostile(port))
        until(lambda: _answers(lambda: ask(port)), 10)


def _answers(probe: Callable[[], tuple[int, bytes]]) -> bool:
    try:
        return probe()[0] == 200
    except (AssertionError, OSError):  # closed without an answer when there are too many
        return False


def test_port_in_use_is_named() -> None:
    async def serve(port: int) -> None:
        with connections.liveness(ServerConfig(health_port=port), lambda: ""):
            pass

    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="cannot listen") as caught:
        asyncio.run(serve(other.getsockname()[1]))
    assert caught.value.field == "--health-port"
