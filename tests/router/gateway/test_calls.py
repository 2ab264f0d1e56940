"""A forwarded answer costs a bounded number of Python calls, those of libraries included, on any machine."""

from __future__ import annotations

import asyncio
import json
import sys
from types import FrameType

import pytest

from fd_core.router.gateway.http1 import clients
from tests.router.gateway.fakes import CHAT, in_loop, routed, turn

TURNS = 20
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
EVENTS = [b"data: {}\n\n"] * 9 + [b"data: [DONE]\n\n"]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Worker(asyncio.Protocol):
    """Answers each request at once, and streams in several writes."""

    role, url = "mixed", ""

    async def __aenter__(self) -> Worker:
        self._server = await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if b'"stream": true' not in data:
            self._transport.write(JSON)  # type: ignore[attr-defined]
            return
        for piece in (STREAM, *(b"%x\r\n%b\r\n" % (len(each), each) for each in EVENTS), b"0\r\n\r\n"):
            self._transport.write(piece)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("policy", "stream", "most"), [("request_num", False, 236), ("cache_aware", False, 246), ("request_num", True, 271)]
)
@in_loop
async def test_forwarding_takes_few_calls_and_one_write(policy: str, stream: bool, most: int) -> None:
    calls = writes = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls, writes
        calls += event == "call" and frame.f_code.co_filename != __file__
        to_client = frame.f_back is not None and frame.f_back.f_code.co_filename == clients.__file__
        writes += event == "call" and to_client and frame.f_code.co_name == "write"

    body = json.dumps({"messages": [turn("what is the capital of France? " * 10)], "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    settings = {"policy": policy, "health_check_interval_secs": 30.0}
    end = b"\r\n0\r\n\r\n" if stream else b"{}"
    async with Worker() as worker, routed(worker, router=settings) as live:  # type: ignore[arg-type]
        reader, writer = await asyncio.open_connection(*live.url.removeprefix("http://").split(":"))
        for number in range(2 * TURNS):
            writer.write(head.encode() + body)
            sys.setprofile(count if number >= TURNS else None)
            answer = await reader.readuntil(end)
            sys.setprofile(None)
            assert answer.startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert calls / TURNS < most and writes == TURNS
