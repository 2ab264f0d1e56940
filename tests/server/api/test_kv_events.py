"""GET /kv_events: accessible to the router only."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from fd_core.config import ServerConfig
from fd_core.engine.clients.data_parallel import DataParallelClient
from fd_core.engine.process.messages import StepEvents
from fd_core.types.kv_events import BEGINNING, Cleared, KVEvent, KVPage, Removed, Stored
from tests.kv.following import ids
from tests.server.fakes import Answer, FakeClient, LiveServer

SECRET = "a-secret-of-this-cluster"
OPEN = {"Authorization": f"Bearer {SECRET}"}
A, B = Stored(BEGINNING, (b"a",), ids([11, 12])), Stored(b"a", (b"b",), ids([13, 14]))


def server(kv_events: bool = True, **settings: Any) -> LiveServer:
    async def client() -> FakeClient:
        return FakeClient(kv_events=kv_events, block_size=2)

    live = LiveServer(client, ServerConfig(**({"router_secret": SECRET} | settings)))
    live.start()
    return live


@pytest.fixture(scope="module")
def live():
    running = server(api_keys=("key",))
    yield running
    running.stop()
    running.join()


def publish(live: LiveServer, *events: KVEvent) -> None:
    live.call(lambda: live.client._dispatch(StepEvents([], kv=events)))


def ask(live: LiveServer, **query: object) -> KVPage:
    answer = live.request("GET", f"/kv_events?{urlencode(query)}", None, **OPEN)
    assert answer.status == 200, answer.body
    return msgspec.msgpack.decode(answer.body, type=KVPage)


def test_events_are_read_from_the_start_and_incrementally(live: LiveServer) -> None:
    publish(live, Cleared(), A)
    page = ask(live)
    assert page.events == (Cleared(), A) and page.block_size == 2
    publish(live, B)
    following = ask(live, after=page.next, instance=page.instance)
    assert (following.events, following.next, following.instance) == ((B,), page.next + 1, page.instance)
    both = (Cleared(), Stored(BEGINNING, (b"a", b"b"), ids([11, 12, 13, 14])))
    assert ask(live, after=page.next, instance="another").events == both, "the number is another process's"
    assert ask(live, after=10**17, instance=page.instance).events == both
    assert live.request("GET", "/kv_events?after=-1", None, **OPEN).status == 400


def test_events_of_several_engines_are_distinguished() -> None:
    async def client() -> DataParallelClient:
        return DataParallelClient([FakeClient(kv_events=True, block_size=2) for _ in range(2)])

    live = LiveServer(client, ServerConfig(router_secret=SECRET))
    live.start()
    try:
        engines = live.client.engines
        live.call(lambda: engines[0]._dispatch(StepEvents([], kv=(A, B))))
        live.call(lambda: engines[1]._dispatch(StepEvents([], kv=(A,))))
        assert live.request("GET", "/health").headers["x-kv-events"] == "1"
        page = ask(live)
        both = Stored(BEGINNING, (b"a", b"b"), ids([11, 12, 13, 14]))
        assert page.engines == 2
        assert page.events == (Cleared(), both, Cleared(engine=1), msgspec.structs.replace(A, engine=1))
    finally:
        live.stop()
        live.join()


@pytest.mark.timing
def test_request_blocks_until_new_events(live: LiveServer) -> None:
    page = ask(live)
    threading.Timer(0.2, lambda: publish(live, Removed((b"b",)))).start()
    started = time.monotonic()
    assert ask(live, after=page.next, instance=page.instance).events == (Removed((b"b",)),)
    assert 0.1 < time.monotonic() - started < 5


@pytest.mark.parametrize("given", [None, "Bearer key", "Bearer ", f"Basic {SECRET}", f"Bearer {SECRET}x", SECRET])
def test_other_credentials_are_rejected(live: LiveServer, given: str | None) -> None:
    answer = live.request("GET", "/kv_events", None, **({} if given is None else {"Authorization": given}))
    assert (answer.status, answer.error["code"]) == (403, "invalid_secret")
    assert "secret" in answer.error["message"] and SECRET not in answer.error["message"]


def test_router_secret_grants_nothing_else(live: LiveServer) -> None:
    assert live.request("GET", "/v1/models", None, **OPEN).status == 401
    assert live.request("GET", "/kv_events/", None, **OPEN).status in (401, 404)


def test_events_are_offered_in_health_and_not_in_openapi(live: LiveServer) -> None:
    assert live.request("GET", "/health").headers["x-kv-events"] == "1"
    assert "/kv_events" not in live.request("GET", "/openapi.json").json["paths"]


@pytest.mark.parametrize("settings", [{"kv_events": False}, {"router_secret": ""}])
def test_without_the_flag_or_a_secret_the_route_is_404(settings: dict[str, Any]) -> None:
    live = server(**settings)
    try:
        answer: Answer = live.request("GET", "/kv_events", None, **OPEN)
        assert answer.status == 404 and "--kv-events" in answer.error["message"]
        assert "x-kv-events" not in live.request("GET", "/health").headers
    finally:
        live.stop()
        live.join()


@pytest.mark.timing
def test_shutdown_ends_waiting_requests(caplog: pytest.LogCaptureFixture) -> None:
    live = server()
    answers: list[Answer] = []
    with caplog.at_level(logging.DEBUG):
        publish(live, A)
        page = ask(live)
        query = urlencode({"after": page.next, "instance": page.instance})
        waiting = threading.Thread(
            target=lambda: answers.append(live.request("GET", f"/kv_events?{query}", None, **OPEN))
        )
        waiting.start()
        time.sleep(0.2)
        started = time.monotonic()
        live.stop()
        live.join()
        waiting.join(60)
    assert time.monotonic() - started < 4
    assert [answer.status for answer in answers] == [503]
    assert SECRET not in caplog.text and repr(A.tokens) not in caplog.text
