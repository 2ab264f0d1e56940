"""Socket, readiness, signals and drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from fd_core.config import ServerConfig
from fd_core.errors import ConfigError
from fd_core.http.connections.listening import bind_socket, warn_if_open
from fd_core.server.serve import serve_http
from tests.server.fakes import FakeClient, byte_tokenizer, chat_template, live
from tests.server.stream.test_disconnect import eventually
from tests.server.test_abort import Background, waiting


def test_port_in_use_is_named_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}") as caught:
            bind_socket("127.0.0.1", port)
    assert caught.value.field == "--port" and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("host", "port", "field"),
    [
        ("no.such.host.invalid", 0, "--host"),
        ("a" * 80, 0, "--host"),
        ("a..b", 0, "--host"),
        ("192.0.2.1", 0, "--host"),  # an address reserved for documentation, which no machine has
        ("127.0.0.1", 65536, "--port"),
    ],
)
def test_invalid_hosts_and_ports(host: str, port: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind_socket(host, port)
    assert caught.value.field == field


def test_port_taken_between_bind_and_listen_is_named() -> None:
    async def scenario() -> None:
        sock = bind_socket("127.0.0.1", 0)
        rival = bind_socket("127.0.0.1", sock.getsockname()[1])
        rival.listen()
        with rival:
            await serve_http(ServerConfig(), FakeClient(), byte_tokenizer(), chat_template(), sock=sock)

    with pytest.raises(ConfigError, match="cannot listen"):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [
        ("0.0.0.0", (), True),
        ("0.0.0.0", ("k",), False),
        ("127.0.0.1", (), False),
        ("localhost", (), False),
        ("::1", (), False),
        ("example.org", (), True),
    ],
)
def test_public_server_without_a_key_warns(
    caplog: pytest.LogCaptureFixture, host: str, keys: tuple[str, ...], warned: bool
) -> None:
    warn_if_open(host, keys=bool(keys))
    assert bool(caplog.records) == warned


def test_drain_finishes_running_requests_and_rejects_others() -> None:
    with live(drain_seconds=60.0) as server:
        assert server.get("/ready").json == {"status": "ok", "reason": None}
        server.client.held = True
        running = Background(server, "r", stream=True)
        waiting(server, 1)
        server.stop()
        eventually(lambda: server.get("/ready").status == 503)
        assert server.get("/health").status == 200
        ready = server.get("/ready")
        assert (ready.status, ready.json["reason"]) == (503, "the server is shutting down")
        refused = server.post("/v1/completions", {"prompt": "b"})
        assert (refused.status, refused.error["code"]) == (503, "draining")
        server.client.held = False
        assert running.answer.events[-1] == "[DONE]"
        server.join()


@pytest.mark.timing
def test_request_beyond_the_drain_timeout_is_aborted() -> None:
    with live(drain_seconds=0.1) as server:
        server.client.held = True
        running = Background(server, "r")
        waiting(server, 1)
        start = time.monotonic()
        server.stop()
        assert running.answer.json["choices"][0]["stop_reason"] == "abort"
        server.join()
        assert time.monotonic() - start < 3


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.timing
def test_signal_drains_and_second_signal_exits_at_once(signals: int, loop: Callable[[], Any]) -> None:
    """Runs on the main thread, where signals arrive; a thread sends them once the server serves."""
    drain = 20.0 if signals == 2 else 0.2

    async def scenario() -> float:
        client = FakeClient()
        client.held = True
        sock = bind_socket("127.0.0.1", 0)
        port = sock.getsockname()[1]

        def interrupt() -> None:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                body = b'{"prompt":"a"}'
                connection.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%s" % (len(body), body)
                )
                while not client.live:
                    time.sleep(0.005)
                for _ in range(signals):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.1)
                while data := connection.recv(65536):
                    answers.append(data)

        answers: list[bytes] = []
        thread = threading.Thread(target=interrupt)
        start = time.monotonic()
        config = ServerConfig(drain_seconds=drain)
        await serve_http(
            config, client, byte_tokenizer(), chat_template(), sock=sock, on_ready=lambda _: thread.start()
        )
        thread.join()
        assert b'"stop_reason":"abort"' in b"".join(answers)
        return time.monotonic() - start

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(scenario()) < 5


def test_prompts_and_keys_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), live(api_keys=("topsecretkey",)) as server:
        headers = {"authorization": "Bearer topsecretkey"}
        server.post("/v1/completions", {"prompt": "my secret prompt", "temprature": 1}, **headers)
        server.post("/v1/completions", {"prompt": "my secret prompt"}, authorization="Bearer wrongsecret")
        server.post("/v1/completions", {"prompt": "my secret prompt", "top_k": "x"}, **headers)
    assert "temprature" in caplog.text
    assert "secret" not in caplog.text
