"""A pooled connection closed by its worker: the request uses another and counts no failed attempt."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

from fd_core.router.gateway.http1.workers import WorkerClient
from tests.router.gateway.fakes import CHAT, FakeWorker, in_loop, routed, turn

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
BODY = {"messages": [turn("hi")]}


class SocketWorker:
    """Answers the first request of each connection, then closes the connection as set by `ends`."""

    role = "mixed"

    def __init__(self, ends: str) -> None:
        self.ends = ends
        self.posts = 0
        self.connections = 0
        self.idle: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> SocketWorker:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for each in self.idle:
            each.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        posts = 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"POST"):
                    writer.write(ANSWER.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                    writer.close()
                    return
                if posts and self.ends == "reset":  # the body stays unread
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    writer.transport.abort()
                    return
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                posts, self.posts = posts + 1, self.posts + 1
                if posts > 1 and self.ends == "lost":
                    writer.close()
                    return
                writer.write(ANSWER)
                self.idle.append(writer)
        except asyncio.IncompleteReadError:
            writer.close()


@in_loop
async def test_connection_closed_before_the_loop_noticed_is_not_used() -> None:
    client = WorkerClient(True, connect_seconds=1.0, read_seconds=60.0)
    async with SocketWorker("none") as worker:
        for posts in range(1, 4):
            async with await client.request("POST", worker.url, "/", {}, b"{}") as answer:
                assert await answer.read_up_to(100) == b"{}"
            # Nothing else runs between the end of the connection and the next request.
            number = worker.idle[-1].get_extra_info("socket").fileno()
            socket.socket(fileno=os.dup(number)).shutdown(socket.SHUT_RDWR)
            assert worker.posts == posts
    client.close()


@in_loop
async def test_reset_before_the_request_was_read_is_not_an_attempt() -> None:
    async with SocketWorker("reset") as worker, routed(worker) as live:  # type: ignore[arg-type]
        for turns in range(1, 5):
            assert (await live.post(CHAT, BODY))[0] == 200
            assert worker.posts == turns, "no request is run twice"
        assert (await live.status())["attempts_lost"] == 0


@in_loop
async def test_reset_after_the_request_was_read_is_an_attempt() -> None:
    async with (
        SocketWorker("lost") as worker,
        FakeWorker("b", "json") as other,
        routed(worker, other) as live,  # type: ignore[arg-type]
    ):
        for _ in range(6):
            assert (await live.post(CHAT, BODY))[0] == 200
        assert worker.posts >= 2 and (await live.status())["attempts_lost"] >= 1
