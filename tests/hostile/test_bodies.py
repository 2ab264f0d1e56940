"""Incoming bodies share one memory budget, and ordinary requests still get in while it is exhausted."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from fd_core.config import ServerConfig
from fd_core.errors import ConfigError
from fd_core.http.bodies import BodyBudget
from fd_core.http.errors import ApiError

from .endpoints import COMPLETIONS, JSON, KINDS, endpoint, until

MIB = 2**20
both = pytest.mark.parametrize("kind", KINDS)


@both
def test_content_length_is_charged_before_the_body_arrives(kind: str) -> None:
    with ExitStack() as stack, endpoint(kind, max_body_bytes=MIB, max_body_memory=2 * MIB) as opened:
        unfinished = [stack.enter_context(opened.connect()) for _ in range(2)]
        for connection in unfinished:
            connection.head(f"POST {COMPLETIONS}", JSON, f"Content-Length: {MIB}")
        until(lambda: opened.metrics()["body_memory_bytes"] == 2 * (MIB - 65536))
        with opened.connect() as other:
            other.head(f"POST {COMPLETIONS}", JSON, f"Content-Length: {MIB}")
            status, headers, body = other.answer()
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["error"]["code"] == "body_memory"
        with opened.connect() as small:
            assert small.post({"prompt": "a"}).answer()[0] == 200, "an ordinary request was blocked"
        for connection in unfinished:
            connection.socket.close()
        until(lambda: opened.metrics()["body_memory_bytes"] == 0)
        assert opened.metrics()["bodies_refused_total"] == 1


@both
def test_chunked_bodies_are_charged_as_they_arrive(kind: str) -> None:
    chunk = b"%x\r\n%b\r\n" % (MIB // 2, b" " * (MIB // 2))
    with ExitStack() as stack, endpoint(kind, max_body_bytes=MIB, max_body_memory=MIB) as opened:
        first, second = (stack.enter_context(opened.connect()) for _ in range(2))
        first.head(f"POST {COMPLETIONS}", JSON, "Transfer-Encoding: chunked").send(chunk)
        until(lambda: opened.metrics()["body_memory_bytes"] == MIB // 2 - 65536)
        second.head(f"POST {COMPLETIONS}", JSON, "Transfer-Encoding: chunked").send(chunk)
        until(lambda: opened.metrics()["body_memory_bytes"] == MIB - 2 * 65536)
        first.send(chunk)
        assert first.error() == (503, "body_memory")
        second.send(b"0\r\n\r\n")
        assert second.answer()[0] in (200, 400), "the other body was interrupted"
        until(lambda: opened.metrics()["body_memory_bytes"] == 0)


@both
def test_body_memory_is_released_after_each_request(kind: str) -> None:
    with endpoint(kind, max_body_bytes=MIB) as opened:
        for size in (10, 100_000, 2 * MIB):
            with opened.connect() as connection:
                connection.post({"prompt": "a", "unknown": "b" * size} if size < MIB else {"prompt": "b" * size})
                assert connection.answer()[0] == (200 if size < MIB else 413)
        assert opened.metrics()["body_memory_bytes"] == 0


def test_router_releases_body_memory_after_the_worker_responds() -> None:
    with endpoint("router") as opened, opened.connect() as connection:
        opened.inner.usual = "stops:1"
        connection.post({"prompt": "a" * 500_000, "stream": True})
        while b"index" not in connection.socket.recv(65536):
            pass
        assert opened.metrics()["body_memory_bytes"] == 0, "the body is no longer needed"


def test_share_grows_with_received_bytes_and_is_released_once() -> None:
    budget = BodyBudget(MIB)
    with budget.share("100", MIB) as share:
        share.received(50)
        assert budget.stats.used == 0, "the first bytes of each body are not charged"
        share.received(MIB // 2)
        assert budget.stats.used == MIB // 2 + 50 - 65536
        with pytest.raises(ApiError, match="--max-body-size"):
            share.received(MIB)
    share.release()
    assert budget.stats.used == 0


def test_budget_smaller_than_one_body_is_rejected() -> None:
    with pytest.raises(ConfigError, match="is smaller than max_body_bytes") as caught:
        ServerConfig(max_body_bytes=2 * MIB, max_body_memory=MIB)
    assert caught.value.field == "--max-body-memory"
