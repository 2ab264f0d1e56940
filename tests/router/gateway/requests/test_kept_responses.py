"""Stored responses: every request that names one is routed to the worker that stores it."""

from __future__ import annotations

import json

import pytest

from tests.router.gateway.fakes import FakeWorker, Live, in_loop, routed

RESPONSES = "/v1/responses"


async def _answered_by(live: Live, method: str, path: str, body: bytes = b"") -> str:
    async with live.client.request(method, live.url + path, data=body) as answer:
        assert answer.status == 200
        return str(json.loads(await answer.read())["worker"])


@pytest.mark.parametrize("path", [RESPONSES, f"{RESPONSES}/input_tokens"])
@in_loop
async def test_follow_up_is_routed_to_the_worker_with_the_response(path: str) -> None:
    async with FakeWorker("a", "json") as a, FakeWorker("b", "json") as b, routed(a, b) as live:
        a.keeps, b.keeps = {"resp_1"}, {"resp_2"}
        for name, keeper in (("resp_1", "a"), ("resp_2", "b")) * 3:
            body = json.dumps({"input": "x", "previous_response_id": name}).encode()
            assert await _answered_by(live, "POST", path, body) == keeper
        await live.wait_until_idle()


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@in_loop
async def test_response_is_read_and_deleted_at_its_worker(method: str) -> None:
    async with FakeWorker("a", "json") as a, FakeWorker("b", "json") as b, routed(a, b) as live:
        b.keeps = {"resp_2"}
        for _ in range(3):
            assert await _answered_by(live, method, f"{RESPONSES}/resp_2") == "b"
        assert not a.seen


@in_loop
async def test_busy_keeper_is_not_replaced_by_another_worker() -> None:
    async with FakeWorker("a", "429") as a, FakeWorker("b", "404") as b, routed(a, b) as live:
        a.keeps = {"resp_1"}
        assert (await live.post(RESPONSES, {"input": "x", "previous_response_id": "resp_1"}))[0] == 429
        assert not b.seen


@pytest.mark.parametrize("name", ["resp_1", "", 7, None, "../admin", "x/y?z"])
@in_loop
async def test_unknown_response_is_rejected_by_a_worker(name: object) -> None:
    async with FakeWorker("a", "400") as a, FakeWorker("b", "400") as b, routed(a, b) as live:
        assert (await live.post(RESPONSES, {"input": "x", "previous_response_id": name}))[0] == 400
        assert len(a.seen) + len(b.seen) == 1


@in_loop
async def test_decode_workers_store_responses_too() -> None:
    async with (
        FakeWorker("p", role="prefill") as prefill,
        FakeWorker("a", "json", role="decode") as a,
        FakeWorker("b", "json", role="decode") as b,
        routed(prefill, a, b) as live,
    ):
        b.keeps = {"resp_1"}
        body = json.dumps({"input": "x", "previous_response_id": "resp_1"}).encode()
        assert [await _answered_by(live, "POST", RESPONSES, body) for _ in range(3)] == ["b"] * 3
