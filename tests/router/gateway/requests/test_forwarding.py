"""Streams are forwarded unbuffered; failures are retried before the first byte and reported after it."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from typing import Any

import aiohttp
import pytest

from fd_core.router.gateway.http1.workers import WorkerClient
from fd_core.router.workers import WorkerState
from tests.router.gateway.fakes import (
    CHAT,
    COMPLETIONS,
    QUICK,
    FakeWorker,
    Live,
    events,
    eventually,
    in_loop,
    routed,
    turn,
)
from tests.server.processes import free_port


@in_loop
async def test_stream_is_forwarded_without_buffering() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        worker.pause = 0.15
        arrived = []
        async with live.client.post(live.url + CHAT, json={"messages": [turn("hi")], "stream": True}) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            while chunk := await answer.content.readany():
                arrived.append((time.monotonic(), chunk))
        assert len(arrived) >= worker.chunks
        assert arrived[1][0] - arrived[0][0] > 0.05, "chunks were held back"
        whole = b"".join(chunk for _, chunk in arrived)
        assert [json.loads(each)["index"] for each in events(whole)[:-1]] == [0, 1, 2, 3]
        assert events(whole)[-1] == "[DONE]"
    assert live.router.snapshot().tally.served == 1


@in_loop
async def test_request_reaches_the_worker_unchanged() -> None:
    async with FakeWorker(usual="json") as worker:
        worker.url = worker.url.replace("127.0.0.1", "localhost")  # cookies are kept for names only
        async with routed(worker) as live:
            await _arrives_as_sent(worker, live)


async def _arrives_as_sent(worker: FakeWorker, live: Live) -> None:
    body = b'{"prompt":  "a"}'
    status, headers, answer = await live.post(
        f"{COMPLETIONS}?x=%2F1", body, X_Request_Id="trace-1", Authorization="Bearer of-the-worker", TE="trailers"
    )
    assert (status, json.loads(answer)) == (200, {"worker": "w"})
    target, seen, sent = worker.seen[0]
    assert (target, sent) == (f"{COMPLETIONS}?x=%2F1", body)
    assert seen["X-Request-Id"] == headers["X-Request-Id"] == "trace-1"
    assert seen["Authorization"] == "Bearer of-the-worker"
    assert "TE" not in seen and seen["Host"] == worker.url.removeprefix("http://")
    await live.post(COMPLETIONS, body)
    assert "Cookie" not in worker.seen[1][1], "a cookie of one client reached another"
    assert len(worker.seen[1][1]["X-Request-Id"]) == 32


@pytest.mark.parametrize("word", ["die", "head", "torn:0", "json_dies", "500", "502", "504", "429", "503", "404"])
@in_loop
async def test_failure_before_first_byte_is_retried_elsewhere(word: str) -> None:
    async with FakeWorker("a") as a, FakeWorker("b") as b, routed(a, b) as live:
        first = min((a, b), key=lambda worker: worker.url)
        first.script.append(word)
        status, _, body = await live.post()
        assert (status, events(body)[-1]) == (200, "[DONE]")
        assert (len(a.seen), len(b.seen)) == (1, 1)
        shown = live.router.snapshot()
        assert shown.retries == 1
        tally = next(each.tally for each in shown.workers if each.worker.url == first.url)
        blameless = word in ("429", "503", "404")
        assert (tally.failed, tally.declined) == ((0, 1) if blameless else (1, 0))


@in_loop
async def test_bad_request_is_not_retried() -> None:
    async with FakeWorker("a", "400") as a, FakeWorker("b", "400") as b, routed(a, b) as live:
        status, _, body = await live.post()
        assert status == 400 and json.loads(body)["error"]["code"] == "invalid_value"
        assert len(a.seen) + len(b.seen) == 1


@in_loop
async def test_request_that_returns_to_its_router_ends() -> None:
    async with FakeWorker(usual="json") as worker, routed() as one, routed() as other:
        one.router.register(other.url, "mixed", 0.0)
        other.router.register(one.url, "mixed", 0.0)
        await one.healthy(1)
        await other.healthy(1)
        for path in (CHAT, "/v1/abort_requests"):
            await one.post(path, {"abort_all": True, "messages": [turn("hi")]})
        status, _, body = await one.post()
        assert (status, json.loads(body)["error"]["code"]) == (508, "routing_loop")
        one.router.register(worker.url, "mixed", 0.0)
        await one.healthy(2)
        for _ in range(4):
            assert (await one.post())[0] == 200


@in_loop
async def test_unreachable_worker_is_skipped() -> None:
    absent = FakeWorker("none")
    absent.url = f"http://127.0.0.1:{free_port()}"
    async with FakeWorker() as worker, routed(worker, absent, healthy=1) as live:
        for _ in range(4):
            assert (await live.post())[0] == 200


@pytest.mark.parametrize("word", ["after:3", "torn:3", "unended"])
@in_loop
async def test_failure_after_first_byte_becomes_an_error_event(word: str) -> None:
    async with FakeWorker("a", word) as a, FakeWorker("b", word) as b, routed(a, b) as live:
        status, _, body = await live.post()
        received = events(body)
        assert status == 200 and b"[DONE]" not in body
        *pieces, last = received
        assert [json.loads(each)["index"] for each in pieces] == list(range(len(pieces))) and len(pieces) >= 3
        assert json.loads(last)["error"]["code"] == "worker_lost"
        assert body.count(b"event: error\n") == 1
        assert len(a.seen) + len(b.seen) == 1, "an answer that had started was retried"
    assert live.router.snapshot().tally.failed == 1


@in_loop
async def test_error_event_of_a_worker_is_not_repeated() -> None:
    async with FakeWorker(usual="error") as worker, routed(worker) as live:
        _, _, body = await live.post()
        assert body.count(b"event: error") == 1 and b'"own"' in body and b"[DONE]" not in body


@in_loop
async def test_compressed_response_is_forwarded_unchanged() -> None:
    async with FakeWorker(usual="zipped") as worker, routed(worker) as live:
        _, headers, body = await live.post()
        assert headers["Content-Encoding"] == "gzip" and gzip.decompress(body) == b"data: [DONE]\n\n"


@in_loop
async def test_silent_worker_times_out() -> None:
    async with FakeWorker("a") as a, FakeWorker("b") as b, routed(a, b, read_seconds=1.0) as live:
        min((a, b), key=lambda worker: worker.url).script.append("hang")
        assert events((await live.post())[2])[-1] == "[DONE]"
        for worker in (a, b):
            worker.script.append("hang")
        assert (await live.post())[0] == 502


@in_loop
async def test_streams_of_other_apis_end_without_done() -> None:
    async with FakeWorker(usual="unended") as worker, routed(worker) as live:
        _, _, body = await live.post("/v1/responses", {"input": "x"})
        assert len(events(body)) == 4 and b"error" not in body


@pytest.mark.parametrize(("word", "status"), [("429", 429), ("503", 503), ("500", 500), ("die", 502)])
@in_loop
async def test_client_gets_an_error_if_every_worker_fails(word: str, status: int) -> None:
    async with FakeWorker("a", word) as a, FakeWorker("b", word) as b, routed(a, b) as live:
        got, headers, body = await live.post()
        assert got == status and json.loads(body)["error"]["message"]
        assert len(a.seen) == len(b.seen) == 1
        if status in (429, 503):
            assert int(headers["Retry-After"]) >= 1


@in_loop
async def test_without_a_healthy_worker_requests_get_503() -> None:
    async with FakeWorker() as worker:
        worker.healthy = False
        async with routed(worker, healthy=0) as live:
            status, headers, body = await live.post()
            assert status == 503 and int(headers["Retry-After"]) >= 1
            assert json.loads(body)["error"]["type"] == "server_error"
            assert (await live.get("/ready"))[0] == 503 and (await live.get("/health"))[0] == 200
            worker.healthy = True
            await live.healthy(1)
            assert (await live.post())[0] == 200


@in_loop
async def test_full_router_answers_429() -> None:
    async with FakeWorker(usual="hang") as worker, routed(worker, router={"max_requests_per_worker": 1}) as live:
        running = asyncio.create_task(live.post())
        await eventually(lambda: worker.running == 1)
        status, headers, body = await live.post()
        assert (status, json.loads(body)["error"]["code"]) == (429, "all_busy")
        assert int(headers["Retry-After"]) >= 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@in_loop
async def test_client_disconnect_cancels_the_request_at_the_worker() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        worker.pause, worker.chunks = 0.02, 1000
        async with live.client.post(live.url + CHAT, json={"messages": [turn("hi")], "stream": True}) as answer:
            await answer.content.readany()
            assert live.router.snapshot().total.requests == 1
            answer.close()
        await eventually(lambda: worker.left == 1 and worker.running == 0)
        await live.wait_until_idle()
        worker.script.append("hang")
        running = asyncio.create_task(live.post())
        await eventually(lambda: worker.running == 1)
        running.cancel()
        await eventually(lambda: worker.left == 2)
    assert live.router.snapshot().tally.left == 2


@in_loop
async def test_first_byte_ends_the_prefill() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        worker.pause, worker.chunks = 0.05, 100
        async with live.client.post(live.url + CHAT, json={"messages": [turn("hi" * 100)], "stream": True}) as answer:
            await answer.content.readany()
            load = live.router.snapshot().total
            assert (load.requests, load.waiting, load.prefill_tokens) == (1, 0, 0)
            answer.close()


@in_loop
async def test_requests_to_a_hanging_worker_are_retried() -> None:
    async with FakeWorker("a") as a, FakeWorker("b") as b, routed(a, b, router=QUICK) as live:
        first = min((a, b), key=lambda worker: worker.url)
        first.script.append("hang")
        running = asyncio.create_task(live.post())
        await eventually(lambda: first.running == 1)
        first.hangs = True
        status, _, body = await running
        assert (status, events(body)[-1]) == (200, "[DONE]")


@in_loop
@pytest.mark.timing
async def test_stalled_stream_ends_when_its_worker_is_unreachable() -> None:
    async with FakeWorker() as worker, routed(worker, router=QUICK, unreachable_seconds=0.5) as live:
        worker.pause = 0.01
        worker.script.append("stops:2")
        began = time.monotonic()
        running = asyncio.create_task(live.post())
        await eventually(lambda: worker.written == 2)
        worker.hangs = True
        _, _, body = await running
        assert 0.5 <= time.monotonic() - began < 5.0
        assert len(events(body)) == 3 and b"worker_lost" in body and b"[DONE]" not in body
        assert live.router.snapshot().tally.failed == 1


async def begun(live: Live, worker: FakeWorker, pause: float, chunks: int) -> asyncio.Task[tuple[int, Any, bytes]]:
    """Return a request whose answer has started; from then on the worker answers no health check."""
    worker.pause, worker.chunks = pause, chunks
    running = asyncio.create_task(live.post())
    await eventually(lambda: worker.written >= 1)
    worker.hangs = True
    return running


@in_loop
async def test_active_stream_survives_failing_health_checks() -> None:
    async with FakeWorker() as worker, routed(worker, router=QUICK, unreachable_seconds=2.0) as live:
        running = await begun(live, worker, pause=0.1, chunks=30)
        status, _, body = await running
        assert (status, events(body)[-1]) == (200, "[DONE]")


@in_loop
async def test_router_that_was_suspended_does_not_blame_workers() -> None:
    async with FakeWorker() as worker, routed(worker, router=QUICK, unreachable_seconds=1.0) as live:
        running = await begun(live, worker, pause=0.2, chunks=8)
        await asyncio.sleep(0.1)  # a health check is in flight, and the stream is waiting
        time.sleep(2.5)  # as if the process had been stopped
        worker.hangs = False
        status, _, body = await running
        assert (status, events(body)[-1]) == (200, "[DONE]")
        assert live.router.snapshot().workers[0].state is WorkerState.HEALTHY


@in_loop
async def test_slow_reader_does_not_count_against_the_worker() -> None:
    client = WorkerClient(True, connect_seconds=1.0, read_seconds=60.0)
    async with FakeWorker(usual="stops:1") as worker:
        answer = await client.request("POST", worker.url, CHAT, {}, b"{}", forwards=True)
        assert await answer.readany() and not answer.passes
        waiting = asyncio.create_task(answer.readany())
        await asyncio.sleep(0)
        assert not client.expire_streams(worker.url, 0.0), "nothing was sent to the client"
        answer.passes = True
        assert not client.expire_first_bytes(worker.url) and not client.expire_streams(worker.url, 10.0)
        assert not client.expire_streams("http://other", 0.0)
        assert client.expire_streams(worker.url, 0.0) == 1
        with pytest.raises(TimeoutError):
            await waiting
        assert not client.expire_streams(worker.url, 0.0), "nothing is waited for"
    client.close()


@in_loop
async def test_unhealthy_worker_may_finish_running_requests() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        worker.goes_on.clear()
        running = asyncio.create_task(live.post())
        await eventually(lambda: worker.running == 1)
        worker.healthy = False
        await live.healthy(0)
        worker.goes_on.set()
        status, _, body = await running
        assert (status, events(body)[-1]) == (200, "[DONE]")


@in_loop
async def test_slow_client_applies_backpressure_with_bounded_memory() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        worker.chunks = 10**9
        reader, writer = await asyncio.open_connection(*live.url.removeprefix("http://").split(":"), limit=1024)
        body = json.dumps({"messages": [turn("hi")], "stream": True}).encode()
        writer.write(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body)
        )
        await reader.readline()
        before = -1
        async with asyncio.timeout(20):
            while worker.written != before:  # until every buffer on the path is full
                before = worker.written
                await asyncio.sleep(0.2)
        assert worker.running == 1
        writer.close()
        await eventually(lambda: worker.left == 1)


@in_loop
async def test_stream_to_a_client_that_pauses_arrives_whole_and_in_order() -> None:
    async with FakeWorker("w" * 4000) as worker, routed(worker) as live:
        worker.chunks = 4000
        async with live.client.post(live.url + CHAT, json={"messages": [turn("hi")], "stream": True}) as answer:
            before = -1
            while worker.written != before:
                before = worker.written
                await asyncio.sleep(0.2)
            assert worker.written < worker.chunks
            whole = await answer.read()
        assert [json.loads(each)["index"] for each in events(whole)[:-1]] == [*range(worker.chunks)]
    assert live.router.snapshot().tally.served == 1


@in_loop
async def test_large_response_arrives_whole_or_fails_visibly() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        worker.script.extend(["big", "big_dies"])
        status, headers, body = await live.post()
        assert (status, headers["Content-Length"], len(body)) == (200, str(3 << 20), 3 << 20)
        with pytest.raises(aiohttp.ClientPayloadError):
            await live.post()
    assert (live.router.snapshot().tally.served, live.router.snapshot().tally.failed) == (1, 1)


@in_loop
async def test_running_requests_finish_while_the_router_drains() -> None:
    async with FakeWorker() as worker, routed(worker, drain_seconds=60.0) as live:
        worker.goes_on.clear()
        running = asyncio.create_task(live.post())
        await eventually(lambda: worker.running == 1)
        live.stop.set()
        await asyncio.sleep(0.02)
        status, headers, _ = await live.post()
        assert status == 503 and headers["Retry-After"]
        worker.goes_on.set()
        assert events((await running)[2])[-1] == "[DONE]"


@in_loop
async def test_requests_beyond_the_drain_timeout_are_aborted() -> None:
    async with FakeWorker() as worker, routed(worker, drain_seconds=0.1) as live:
        worker.pause, worker.chunks = 0.05, 1000
        async with live.client.post(live.url + CHAT, json={"messages": [turn("hi")], "stream": True}) as answer:
            await answer.content.readany()
            live.stop.set()
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
