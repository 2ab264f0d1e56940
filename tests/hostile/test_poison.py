"""A request that fails on every worker is the client's fault: no worker is taken out of rotation for it."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import aiohttp
import pytest

from fd_core.router.gateway.http1 import workers
from fd_core.text.chat_template import ChatTemplate
from tests.router.gateway.fakes import FakeWorker, Live, events, eventually, in_loop, routed
from tests.server import fakes
from tests.server.fakes import TEMPLATE, live

POISON = b"POISON"
BODY = b'{"messages":[{"role":"user","content":"POISON"}],"stream":true}'
ROUTER = {"circuit_failure_threshold": 3, "circuit_open_secs": 60.0}


def test_chat_beyond_the_template_output_limit_is_a_client_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The body has the largest allowed size, and the template adds a few characters: this used to be a 500."""
    head, tail = b'{"messages":[{"role":"user","content":"', b'"}]}'
    body = head + b"a" * (16 * 1024 * 1024 - len(head) - len(tail)) + tail
    template = ChatTemplate("{{ '" + "x" * 100 + "' }}" + TEMPLATE)
    monkeypatch.setattr(fakes, "chat_template", lambda: template)
    with live() as server:
        answer = server.post("/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, "messages"), answer.error


async def all_serve(live: Live, *workers: FakeWorker) -> None:
    """Check that every worker gets one of the next requests."""
    before = [len(worker.seen) for worker in workers]
    for _ in range(2 * len(workers)):
        status, _, body = await live.post()
        assert (status, events(body)[-1]) == (200, "[DONE]"), "a request of another client was rejected"
    assert all(len(worker.seen) > count for worker, count in zip(workers, before, strict=True))
    assert {each.circuit for each in live.router.snapshot().workers} == {"closed"}


@pytest.mark.parametrize(("word", "status"), [("500", 500), ("502", 502), ("504", 504), ("die", 502), ("head", 502)])
@in_loop
async def test_request_failing_on_every_worker_opens_no_circuit(word: str, status: int) -> None:
    async with (
        FakeWorker("a") as a,
        FakeWorker("b") as b,
        FakeWorker("c") as c,
        routed(a, b, c, router=ROUTER) as live,
    ):
        for worker in (a, b, c):
            worker.upon[POISON] = word
        for _ in range(7):
            assert (await live.post(body=BODY))[0] == status
        attempts = sum(BODY in one[2] for worker in (a, b, c) for one in worker.seen)
        assert attempts == 14, "a request that failed twice was sent to a third worker"
        await all_serve(live, a, b, c)


@pytest.mark.parametrize("word", ["after:2", "torn:2", "unended", "error", "json_dies", "big_dies", "400"])
@in_loop
async def test_broken_stream_opens_no_circuit(word: str) -> None:
    async with FakeWorker("a") as a, FakeWorker("b") as b, routed(a, b, router=ROUTER) as live:
        for worker in (a, b):
            worker.upon[POISON] = word
        for _ in range(8):
            try:
                await live.post(body=BODY)
            except aiohttp.ClientError:
                assert word == "big_dies"
        await all_serve(live, a, b)


@in_loop
async def test_pair_survives_a_request_failing_on_its_decode_worker() -> None:
    async with (
        FakeWorker("p", role="prefill") as p,
        FakeWorker("d", role="decode") as d,
        routed(p, d, router=ROUTER) as live,
    ):
        d.upon[POISON], d.outcome = "500", "lost"
        for _ in range(8):
            assert (await live.post(body=BODY))[0] == 500
        d.outcome = "transferred"
        await all_serve(live, d)


@in_loop
async def test_worker_failing_where_others_succeed_is_taken_out() -> None:
    async with FakeWorker("a", "500") as a, FakeWorker("b") as b, routed(a, b, router=ROUTER) as live:
        for _ in range(12):
            assert (await live.post())[0] == 200
        assert len(a.seen) == 3
        circuits = {each.worker.url: each.circuit for each in live.router.snapshot().workers}
        assert circuits == {a.url: "open", b.url: "closed"}


@in_loop
async def test_router_out_of_descriptors_does_not_blame_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that opens a thousand connections to the router exhausts its descriptors, not its workers."""
    async with FakeWorker("a") as a, FakeWorker("b") as b, routed(a, b, router=ROUTER) as live:
        loop, refused = asyncio.get_running_loop(), 0
        real, ports = loop.create_connection, {int(each.url.rpartition(":")[2]) for each in (a, b)}

        async def connect(make: Any, *where: Any, **named: Any) -> Any:
            nonlocal refused
            if where[1:] and where[1] in ports:
                refused += 1
                raise OSError(errno.EMFILE, "too many open files")
            return await real(make, *where, **named)

        with monkeypatch.context() as patched:
            patched.setattr(loop, "create_connection", connect)
            patched.setattr(workers, "_IDLE_SECONDS", 0.0)
            for _ in range(6):
                status, headers, _ = await live.post()
                assert status == 503 and headers["Retry-After"]
            before = refused
            await eventually(lambda: refused >= before + 4)  # failed health checks
        assert {each.state.value for each in live.router.snapshot().workers} == {"healthy"}
        await all_serve(live, a, b)
