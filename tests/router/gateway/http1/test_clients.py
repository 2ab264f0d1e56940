"""Requests are framed as HTTP/1.1 requires, or rejected before a worker sees them."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.router.gateway.fakes import CHAT, FakeWorker, Live, in_loop, routed

HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode()
BODY = b'{"messages": []}'
POST = HEAD + b"Content-Length: 16\r\n\r\n" + BODY


async def sent(live: Live, *pieces: bytes) -> bytes:
    """Return everything that arrives until the gateway ends the connection."""
    reader, writer = await asyncio.open_connection(*live.url.removeprefix("http://").split(":"))
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.02)
    data = await reader.read()
    writer.close()
    return data


@pytest.mark.parametrize(
    "request_",
    [
        HEAD + b"Content-Length: 16\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 16\r\nContent-Length: 5\r\n\r\n" + BODY,
        HEAD + b"Content-Length: +16\r\n\r\n" + BODY,
        HEAD + b"Content-Length : 16\r\n\r\n" + BODY,
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}00\r\n\r\n",
        HEAD + b"X-A: 1\r\n folded\r\nContent-Length: 16\r\n\r\n" + BODY,
        HEAD + b"X-A: 1\nX-B: 2\x0b\r\nContent-Length: 16\r\n\r\n" + BODY,
        b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
@in_loop
async def test_ambiguous_framing_is_rejected(request_: bytes) -> None:
    async with FakeWorker(usual="json") as worker, routed(worker) as live:
        answer = await sent(live, request_, POST)
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
        assert not worker.seen


@in_loop
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        worker.script.extend(["stream", "json"])
        last = b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answer = await sent(live, POST + POST + last + b"\0garbage")
        places = [answer.index(part) for part in (b"event-stream", b"[DONE]", b'{"worker": "w"}', b" 404 ", b" 400 ")]
        assert places == sorted(places) and answer.count(b"HTTP/1.1 ") == 4


@in_loop
async def test_connection_stays_usable_after_a_rejected_body() -> None:
    async with FakeWorker(usual="json") as worker, routed(worker, api_keys=("k",)) as live:
        authorized = POST.replace(b"Host", b"X-Api-Key: k\r\nConnection: close\r\nHost")
        answer = await sent(live, POST[:-16], BODY, authorized)
        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"401", b"200"]
        waits = HEAD + b"Expect: 100-continue\r\nContent-Length: 16\r\n\r\n"
        answer = await sent(live, waits, authorized)
        assert answer.startswith(b"HTTP/1.1 401 ") and b"Connection: close" in answer and not worker.seen[1:]


@pytest.mark.parametrize("part", ["x" * 1000, "x: " + "y" * 1000 + "\r\n"])
@in_loop
async def test_endless_trailer_is_cut_off(part: str) -> None:
    async with FakeWorker(usual="json") as worker, routed(worker) as live:
        begun = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        answer = await sent(live, begun, part.encode() * 80, part.encode() * 80)
        assert answer.startswith(b"HTTP/1.1 400 ") and not worker.seen


@in_loop
async def test_old_client_gets_a_stream_that_ends_with_the_connection() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        answer = await sent(live, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert b"chunked" not in answer and b"Connection: close" in answer and answer.endswith(b"data: [DONE]\n\n")


@in_loop
async def test_head_request_gets_no_body() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        answer = await sent(live, b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer.endswith(b"\r\n\r\n") and b"Content-Length: 29" in answer
