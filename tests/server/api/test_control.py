"""Control endpoints at a server: requests wait while it is paused, and continue where they were."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial

import pytest

from fd_core.config import EngineConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from tests.server.fakes import LiveServer, live
from tests.server.stream.test_disconnect import eventually

BODY = {"prompt": "Hello", "max_tokens": 200, "temperature": 0.8, "seed": 7, "ignore_eos": True}


async def client(where: str, **settings) -> EngineClient:
    config = EngineConfig(model="null", backend="null", max_model_len=400, structured_output=False, **settings)
    return await open_client(config, None, where=where)


@pytest.fixture(scope="module", params=["inproc", "process"])
def server(request):
    with live(partial(client, request.param)) as running:
        yield running


def complete(server: LiveServer, found: list[str], **fields) -> threading.Thread:
    def ask() -> None:
        answer = server.post("/v1/completions", BODY | fields)
        assert answer.status == 200, answer.json
        found.append(answer.json["choices"][0]["text"])

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def running(server: LiveServer) -> int:
    return int(server.get("/load").json["server_load"])


def test_requests_wait_until_resume_with_the_same_text(server: LiveServer) -> None:
    expected: list[str] = []
    complete(server, expected).join()
    found: list[str] = []
    first = complete(server, found)
    assert server.post("/v1/pause", {}).json["is_paused"] is True
    second = complete(server, found)
    eventually(lambda: running(server) >= 1)
    assert server.get("/v1/control").json == server.get("/is_paused").json
    assert server.get("/ready").status == 200
    assert server.post("/v1/resume", {}).json["is_paused"] is False
    first.join()
    second.join()
    assert found == expected * 2


def test_paused_engine_is_not_taken_for_a_dead_one(server: LiveServer) -> None:
    """A restarted engine is paused as the one before, and its watchdog does not count the time."""
    with live(partial(client, "process", watchdog_seconds=0.4)) as other:
        found: list[str] = []
        other.post("/v1/pause", {})
        waiting = complete(other, found)
        eventually(lambda: running(other) == 1)
        engine = other.client
        os.kill(engine.pid, signal.SIGKILL)
        eventually(lambda: engine.alive and engine.info.epoch == 2 and engine.info.paused, seconds=30)
        waiting.join(timeout=1.0)
        assert waiting.is_alive() and engine.info.epoch == 2 and not found
        other.post("/v1/resume", {})
        waiting.join()
        complete(other, found).join()
        assert found[0] == found[1]
