"""Idle and slow connections are closed; excess ones get 503, and failures are logged."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from contextlib import ExitStack
from typing import Any

import pytest

from fd_core.config import ServerConfig
from fd_core.http.connections import connections as watching
from fd_core.http.connections.connections import Connections, Listener, WatchedProtocol, connection_limit, source_of
from fd_core.http.connections.listening import bind_socket, raise_descriptor_limit

from .endpoints import COMPLETIONS, JSON, KINDS, endpoint, until

PROMPT = {"prompt": "a"}
BIG = {"prompt": "a", "max_tokens": 390, "stream": True, "n": 100, "logprobs": 20}

both = pytest.mark.parametrize("kind", KINDS)


@both
def test_idle_new_connection_is_closed(kind: str) -> None:
    with endpoint(kind, timeout_headers=0.4) as opened, opened.connect() as connection:
        assert connection.closed_within(2) > 0.3
        assert opened.metrics()["connections_closed_total[head]"] == 1


@both
def test_trickled_head_times_out(kind: str) -> None:
    with endpoint(kind, timeout_headers=0.4) as opened, opened.connect() as connection:
        connection.send("GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert connection.closed_within(2, b"x") > 0.3


@both
def test_keep_alive_timeout_applies_between_requests(kind: str) -> None:
    with endpoint(kind, timeout_headers=5.0, timeout_keep_alive=0.4) as opened, opened.connect() as connection:
        assert connection.head("GET /health").answer()[0] == 200
        assert connection.head("GET /health").answer()[0] == 200
        assert connection.closed_within(2) > 0.3


@both
def test_trickled_second_head_times_out(kind: str) -> None:
    with endpoint(kind, timeout_headers=0.4) as opened, opened.connect() as connection:
        assert connection.head("GET /health").answer()[0] == 200
        time.sleep(0.6)
        connection.send("GET /health HTTP/1.1\r\n")
        assert connection.closed_within(2, b"x") > 0.3


@both
def test_trickled_body_times_out(kind: str) -> None:
    with endpoint(kind, timeout_body=0.4) as opened, opened.connect() as connection:
        connection.head(f"POST {COMPLETIONS}", JSON, "Content-Length: 100000")
        assert connection.closed_within(2, b" ") > 0.3
        assert opened.metrics()["connections_closed_total[body]"] == 1


@both
def test_trickled_body_of_rejected_request_times_out(kind: str) -> None:
    with endpoint(kind, timeout_body=0.4, api_keys=("k",)) as opened, opened.connect() as connection:
        connection.head(f"POST {COMPLETIONS}", JSON, "Content-Length: 100000")
        assert connection.answer()[0] == 401
        connection.closed_within(4, b" ")


@both
def test_steady_body_does_not_time_out(kind: str) -> None:
    body = b'{"prompt": "' + b"a" * 300 + b'", "unknown": "' + b"b" * 400_000 + b'"}'
    with endpoint(kind, timeout_body=0.3) as opened, opened.connect() as connection:
        connection.head(f"POST {COMPLETIONS}", JSON, f"Content-Length: {len(body)}")
        for begin in range(0, len(body), 40_000):
            connection.send(body[begin : begin + 40_000])
            time.sleep(0.1)
        assert connection.answer()[0] == 200


@both
def test_responses_have_no_deadline(kind: str) -> None:
    """Two pipelined requests, both of which take longer than every timeout."""
    limits = dict.fromkeys(("timeout_headers", "timeout_keep_alive", "timeout_body", "timeout_write"), 0.2)
    with endpoint(kind, **limits) as opened, opened.connect() as connection:
        opened.hold() if kind == "server" else setattr(opened.inner, "pause", 0.6)
        connection.post(PROMPT).post(PROMPT)
        time.sleep(0.6)
        opened.release()
        assert connection.answer()[0] == 200


@both
def test_client_that_does_not_read_is_closed_and_its_request_aborted(kind: str) -> None:
    with endpoint(kind, timeout_write=0.5) as opened, opened.connect(window=4096) as connection:
        if kind == "router":
            opened.inner.usual, opened.inner.chunks = "stream", 10**9
        else:
            opened.inner.reply, opened.inner.pause_after = (lambda _: b"a" * 390), 380
        connection.post(BIG)
        until(lambda: opened.requests() > 0)
        until(lambda: opened.metrics()["connections_closed_total[write]"] == 1, 20)
        until(lambda: opened.requests() == 0)


@both
def test_disconnect_during_body_is_not_a_server_error(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with endpoint(kind) as opened:
        for _ in range(5):
            with opened.connect() as connection:
                connection.head(f"POST {COMPLETIONS}", JSON, "Content-Length: 1000").send("{")
                time.sleep(0.05)
        until(lambda: opened.metrics()["connections"] == 1)
        text = opened.get("/metrics")[2].decode()
    assert 'status="500"' not in text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@both
def test_invalid_http_is_logged_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with endpoint(kind) as opened:
        for garbage in (b"\x16\x03\x01\x00\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 2000):
            with opened.connect() as connection:
                assert connection.send(garbage).error() == (400, "invalid_http")
                connection.closed_within(3)
        assert opened.get("/health")[0] == 200
    assert len([record for record in caplog.records if record.levelno > logging.INFO]) == 1


@both
def test_endless_head_is_rejected_by_size(kind: str) -> None:
    with endpoint(kind) as opened, opened.connect() as connection:
        connection.send("GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + "x" * 200_000)
        status, _, body = connection.answer()
        assert (status, b"65,536 bytes" in body) == (431, True)


@both
@pytest.mark.parametrize(
    "target", ["http://xn--/health", "http://xn--a-\xff/", "http://[::1/", "http://a:999999/", "*", "//["]
)
def test_invalid_request_target_gets_a_response(kind: str, target: str) -> None:
    with endpoint(kind) as opened, opened.connect() as connection:
        connection.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("latin-1"))
        assert 400 <= connection.answer()[0] < 500


@both
def test_responses_do_not_name_the_http_libraries(kind: str) -> None:
    with endpoint(kind) as opened:
        for head in ("GET /health HTTP/1.1", "GET /none HTTP/1.1", "POST /v1/completions HTTP/1.1", "GET / HTTP/9.9"):
            with opened.connect() as connection:
                headers = connection.send(f"{head}\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n").answer()[1]
                assert "server" not in headers


@both
@pytest.mark.parametrize("wanted", ["websocket", "h2c"])
def test_upgrade_request_gets_an_ordinary_response(kind: str, wanted: str) -> None:
    with endpoint(kind) as opened, opened.connect() as connection:
        connection.post({"prompt": "a"}, COMPLETIONS, "Connection: Upgrade", f"Upgrade: {wanted}")
        assert connection.answer()[0] == 200


@both
def test_connections_over_the_limit_get_503(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack, endpoint(kind, limit_concurrency=4) as opened:
        opened.hold()
        for _ in range(4):
            stack.enter_context(opened.connect()).post(PROMPT)
        until(lambda: opened.requests() == 4)
        for _ in range(3):
            with opened.connect() as other:
                status, headers, body = other.head("GET /health").answer()
                assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
                assert b'"too_many_connections"' in body
        opened.release()
        if kind == "router":
            stack.close()
        until(lambda: opened.get("/health")[0] == 200)
        assert opened.metrics()["connections_refused_total"] >= 3
        assert opened.metrics()["connections_limit"] == 4
    assert sum("--limit-concurrency" in record.getMessage() for record in caplog.records) == 1


@both
@pytest.mark.parametrize(("given", "most"), [(None, 3), (2, 2)])
def test_per_address_limit_leaves_room_for_other_clients(
    kind: str, given: int | None, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "is_loopback", lambda _: False)
    with ExitStack() as stack, endpoint(kind, limit_concurrency=4, limit_concurrency_per_address=given) as opened:
        for _ in range(most):
            stack.enter_context(opened.connect())
        for _ in range(3):
            with opened.connect() as other:
                assert other.error() == (503, "too_many_connections")
        with opened.connect(source="127.0.0.2") as other:
            assert other.head("GET /health").answer()[0] == 200
            until(lambda: opened.metrics(other)["connections_refused_of_address_total"] == 3)
        stack.close()
        until(lambda: opened.get("/health")[0] == 200)
    assert sum("--limit-concurrency-per-address" in record.getMessage() for record in caplog.records) == 1


@both
def test_loopback_clients_are_exempt_from_the_per_address_limit(kind: str) -> None:
    with ExitStack() as stack, endpoint(kind, limit_concurrency=4, limit_concurrency_per_address=1) as opened:
        for _ in range(4):
            assert stack.enter_context(opened.connect()).head("GET /health").answer()[0] == 200


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::"),
        ("::1", "::1"),
        ("-", "-"),
    ],
)
def test_addresses_of_one_prefix_count_as_one_client(address: str, source: str) -> None:
    assert source_of(address) == source


@both
def test_idle_connections_are_evicted_at_the_limit(kind: str) -> None:
    with ExitStack() as stack, endpoint(kind, limit_concurrency=4) as opened:
        silent = [stack.enter_context(opened.connect()) for _ in range(4)]
        time.sleep(1.1)
        assert opened.get("/health")[0] == 200
        assert opened.metrics()["connections_closed_total[crowd]"] >= 1
        silent[0].closed_within(1)


class _Full(socket.socket):
    """Socket of a process that has run out of descriptors."""

    tried = 0

    def accept(self) -> Any:
        type(self).tried += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_accept_failures_are_counted_and_logged_once_without_spinning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> int:
        sock = _Full(fileno=bind_socket("127.0.0.1", 0).detach())
        seen = Connections(ServerConfig(), 10)
        listener = Listener(sock, WatchedProtocol, seen, None)
        with socket.create_connection(sock.getsockname()):
            await asyncio.sleep(1.3)
        listener.close()
        await listener.wait_closed()
        return seen.stats.accept_errors

    with caplog.at_level(logging.WARNING):
        errors = asyncio.run(scenario())
    assert 2 <= errors == _Full.tried <= 4
    assert [record.getMessage() for record in caplog.records].count(
        "accepting a connection failed: too many open files (logged once a minute)"
    ) == 1


@pytest.mark.parametrize(
    ("allowed", "descriptors", "limit"), [(1024, 1, 768), (1024, 2, 384), (200, 1, 150), (10**6, 1, 10_000)]
)
def test_connection_limit_reserves_descriptors(
    monkeypatch: pytest.MonkeyPatch, allowed: int, descriptors: int, limit: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    assert connection_limit(ServerConfig(), descriptors=descriptors) == limit
    assert connection_limit(ServerConfig(limit_concurrency=7), descriptors=descriptors) == 7


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"), [(1024, 4096, 4096), (4096, 4096, None), (1024, 2**30, 2**20), (1024, -1, 2**20)]
)
def test_descriptor_limit_is_raised(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int | None) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    raise_descriptor_limit()
    assert given == ([] if wanted is None else [(wanted, hard)])
