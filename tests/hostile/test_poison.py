"""A request that every worker fails on is the request's fault: no worker is left out because of it."""

from __future__ import annotations

import errno
from typing import Any

import aiohttp
import pytest

from fd_core.text.chat_template import ChatTemplate
from tests.router.gateway.fakes import FakeWorker, Live, events, eventually, in_loop, routed
from tests.server import fakes
from tests.server.fakes import TEMPLATE, live

POISON = b"POISON"
BODY = b'{"messages":[{"role":"user","content":"POISON"}],"stream":true}'
ROUTER = {"circuit_failure_threshold": 3, "circuit_open_secs": 60.0}


def test_a_conversation_beyond_what_a_template_may_write_is_the_clients_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is as large as a body may be, and the template adds a few characters: that was a 500."""
    head, tail = b'{"messages":[{"role":"user","content":"', b'"}]}'
    body = head + b"a" * (16 * 1024 * 1024 - len(head) - len(tail)) + tail
    template = ChatTemplate("{{ '" + "x" * 100 + "' }}" + TEMPLATE)
    monkeypatch.setattr(fakes, "chat_template", lambda: template)
    with live() as server:
        answer = server.post("/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, "messages"), answer.error


async def all_serve(live: Live, *workers: FakeWorker) -> None:
    """Every worker gets the next requests."""
    before = [len(worker.seen) for worker in workers]
    for _ in range(2 * len(workers)):
        status, _, body = await live.post()
        assert (status, events(body)[-1]) == (200, "[DONE]"), "somebody else's request was refused"
    assert all(len(worker.seen) > count for worker, count in zip(workers, before, strict=True))
    assert {each.circuit for each in live.router.snapshot().workers} == {"closed"}


@pytest.mark.parametrize(("word", "status"), [("500", 500), ("502", 502), ("504", 504), ("die", 502), ("head", 502)])
@in_loop
async def test_what_every_worker_fails_on_takes_no_worker_out(word: str, status: int) -> None:
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
        asked = sum(BODY in one[2] for worker in (a, b, c) for one in worker.seen)
        assert asked == 14, "a request that failed twice alike is tried on no third worker"
        await all_serve(live, a, b, c)


@pytest.mark.parametrize("word", ["after:2", "torn:2", "unended", "error", "json_dies", "big_dies", "400"])
@in_loop
async def test_an_answer_that_breaks_off_takes_no_worker_out(word: str) -> None:
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
async def test_a_pair_outlives_what_its_decode_worker_fails_on() -> None:
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
async def test_a_worker_that_fails_on_what_others_serve_is_left_alone() -> None:
    async with FakeWorker("a", "500") as a, FakeWorker("b") as b, routed(a, b, router=ROUTER) as live:
        for _ in range(12):
            assert (await live.post())[0] == 200
        assert len(a.seen) == 3
        circuits = {each.worker.url: each.circuit for each in live.router.snapshot().workers}
        assert circuits == {a.url: "open", b.url: "closed"}


@in_loop
async def test_descriptors_that_the_router_lacks_are_no_failure_of_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a thousand connections to the router takes its descriptors, not its workers."""
    async with FakeWorker("a") as a, FakeWorker("b") as b, routed(a, b, router=ROUTER) as live:
        real, ports = aiohttp.BaseConnector.connect, {int(each.url.rpartition(":")[2]) for each in (a, b)}
        refused = 0

        async def connect(self: Any, request: Any, *more: Any, **named: Any) -> Any:
            nonlocal refused
            if request.url.port not in ports:
                return await real(self, request, *more, **named)
            refused += 1
            raise aiohttp.ClientConnectorError(request.connection_key, OSError(errno.EMFILE, "too many open files"))

        with monkeypatch.context() as patched:
            patched.setattr(aiohttp.BaseConnector, "connect", connect)
            for _ in range(6):
                status, headers, _ = await live.post()
                assert status == 503 and headers["Retry-After"]
            before = refused
            await eventually(lambda: refused >= before + 4)  # health checks
        assert {each.state.value for each in live.router.snapshot().workers} == {"healthy"}
        await all_serve(live, a, b)
