"""Anthropic clients parse the router's own errors like those of a worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.gateway.fakes import FakeWorker, in_loop, routed, turn

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
ASK = {"model": "m", "max_tokens": 5, "messages": [turn("hi")]}


def error_of(body: bytes | str) -> dict[str, Any]:
    answer = json.loads(body)
    assert set(answer) == {"type", "error"} and answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"} and answer["error"]["message"]
    return answer["error"]


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_router_errors_have_anthropic_format(path: str) -> None:
    async with FakeWorker() as worker, routed(worker, api_keys=("secret",), max_body_bytes=1000) as live:
        status, _, body = await live.post(path, ASK)
        assert (status, error_of(body)["type"]) == (401, "authentication_error")
        status, _, body = await live.post(path, ASK | {"system": "a" * 1000}, X_Api_Key="secret")
        assert (status, error_of(body)["type"]) == (413, "request_too_large")
        worker.script.extend(["die"] * 10)
        status, _, body = await live.post(path, ASK, X_Api_Key="secret")
        assert (status, error_of(body)["type"]) == (502, "api_error")


@in_loop
async def test_aborted_stream_ends_with_an_anthropic_error_event() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        worker.script.append("after:2")
        status, _, body = await live.post("/v1/messages", ASK | {"stream": True})
        name, _, data = body.decode().rstrip().split("\n\n")[-1].partition("\n")
        assert (status, name) == (200, "event: error")
        assert error_of(data.removeprefix("data: "))["type"] == "api_error"


@in_loop
async def test_missing_model_is_retried_on_another_worker() -> None:
    async with FakeWorker("a") as one, FakeWorker("b") as other, routed(one, other) as live:
        for worker in (one, other):
            worker.script.append("no_model")
        status, _, body = await live.post("/v1/messages", ASK)
        assert (status, len(one.seen), len(other.seen)) == (404, 1, 1)
        assert error_of(body)["type"] == "not_found_error"
