"""Shutdown of a server: it announces, serves during the delay, then rejects requests, then exits."""

from __future__ import annotations

import asyncio
import http.client
import json
import time

import pytest

from fd_core.http.draining import DRAINING_HEADER, Drain
from tests.server.fakes import LiveServer, live
from tests.server.stream.test_disconnect import eventually
from tests.server.test_abort import Background, waiting
from tests.server.test_key_limits import state_of

PATH = "/v1/completions"
BODY = {"prompt": "b", "max_tokens": 4}


def left(server: LiveServer) -> None:
    """Stop the server and wait until it announces the shutdown."""
    server.stop()
    while server.get("/ready").status != 503:
        time.sleep(0.005)


@pytest.mark.timing
def test_shutdown_is_announced_and_requests_served_for_the_delay() -> None:
    with live(drain_delay=0.5, drain_seconds=10.0) as server:
        before = server.post(PATH, BODY)
        assert DRAINING_HEADER.lower() not in before.headers and "connection" not in before.headers
        left(server)
        began = time.monotonic()
        health = server.get("/health")
        assert (health.status, health.headers[DRAINING_HEADER.lower()]) == (200, "1")
        answers = []
        while (answer := server.post(PATH, BODY)).status == 200:
            answers.append(answer)
        assert answers and time.monotonic() - began < 5
        assert {each.headers["connection"] for each in answers} == {"close"}
        assert answer.error["code"] == "draining" and answer.headers["retry-after"]
        server.join()


def test_running_stream_is_the_last_answer_of_its_connection() -> None:
    with live(drain_seconds=60.0) as server:
        server.client.held = True
        running = Background(server, "r", stream=True)
        waiting(server, 1)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", PATH, json.dumps(BODY | {"stream": True}), {"content-type": "application/json"})
        waiting(server, 2)
        left(server)
        server.client.held = False
        answer = connection.getresponse()
        assert answer.read().endswith(b"data: [DONE]\n\n") and running.answer.events[-1] == "[DONE]"
        assert connection.sock is None or connection.sock.recv(1) == b"", "the connection stays open"
        server.join()


def test_request_with_an_incomplete_body_is_awaited() -> None:
    body = json.dumps(BODY).encode()
    with live(drain_seconds=60.0) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.putrequest("POST", PATH)
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body[:5])
        eventually(lambda: state_of(server).drain.running == 1)
        left(server)
        while server.post(PATH, BODY).status != 503:
            time.sleep(0.005)
        connection.send(body[5:])
        answer = connection.getresponse()
        assert answer.status == 200 and json.loads(answer.read())["choices"]
        server.join()


def test_second_signal_ends_delay_and_wait() -> None:
    async def scenario() -> None:
        drain, hurry = Drain(), asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, hurry.set)
        drain.running += 1
        await drain.refuse_after(60.0, hurry)
        assert drain.refusing
        await drain.wait(60.0, hurry)

    asyncio.run(asyncio.wait_for(scenario(), 50))  # less than either wait
