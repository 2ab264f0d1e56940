"""Answers of workers are read as HTTP/1.1 frames them, and connections are reused only when they are in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from fd_core.router.gateway.http1.workers import InvalidAnswer, WorkerClient, WorkerUnreachable
from tests.router.gateway.fakes import in_loop

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Fixed:
    """Worker that gives every request the same answer."""

    def __init__(self, answer: bytes, closes: bool) -> None:
        self.answer = answer
        self.closes = closes
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(self.answer)
                if self.closes:
                    break
        writer.close()


@contextlib.asynccontextmanager
async def answering(answer: bytes, *, closes: bool = False) -> AsyncIterator[tuple[Fixed, WorkerClient]]:
    worker, client = Fixed(answer, closes), WorkerClient(True, connect_seconds=1.0, read_seconds=0.4)
    server = await asyncio.start_server(worker.serve, "127.0.0.1", 0)
    worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield worker, client
    client.close()
    server.close()


async def read(worker: Fixed, client: WorkerClient, method: str = "GET") -> tuple[int, bytes]:
    async with await client.request(method, worker.url, "/", {}) as answer:
        return answer.status, await answer.read_up_to(1 << 20)


@pytest.mark.parametrize(
    ("answer", "found", "connections"),
    [
        (OK, (200, b"{}"), 1),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, (200, b"{}"), 1),
        (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b""), 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n", (200, b"ab"), 1),
        (OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"), (200, b"{}"), 3),
        (OK + b"more", (200, b"{}"), 3),
    ],
)
@in_loop
async def test_complete_answers_leave_reusable_connections(
    answer: bytes, found: tuple[int, bytes], connections: int
) -> None:
    async with answering(answer) as (worker, client):
        for _ in range(3):
            assert await read(worker, client) == found
            await asyncio.sleep(0.01)
        assert worker.connections == connections


@in_loop
async def test_parts_taken_directly_wake_no_reader_and_end_its_silence() -> None:
    async with answering(OK[:-2] + b"a") as (worker, client):
        answer = await client.request("GET", worker.url, "/", {}, forwards=True)
        assert await answer.readany() == b"a"
        taken: list[bytes] = []
        answer.direct = lambda part: part != b"c" and not taken.append(part)  # type: ignore[func-returns-value]
        reading = asyncio.create_task(answer.readany())
        await asyncio.sleep(0.01)
        since = answer.waits_since
        answer.connection.on_body(b"b")
        answer.arrived()
        assert since is not None and answer.waits_since is not None and answer.waits_since > since
        for part in (b"c", b"d"):
            answer.connection.on_body(part)
            answer.arrived()
        assert (await reading, taken) == (b"cd", [b"b"])
        answer.close()


@in_loop
async def test_answer_without_length_ends_with_the_connection() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n\r\nall", closes=True) as (worker, client):
        assert await read(worker, client) == (200, b"all")


@in_loop
async def test_answer_to_head_has_no_body() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n") as (worker, client):
        assert await read(worker, client, "HEAD") == (200, b"")


@pytest.mark.parametrize(
    ("answer", "closes", "error"),
    [
        (b"", True, InvalidAnswer),
        (b"\x15\x03\x01", False, InvalidAnswer),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", False, InvalidAnswer),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, False, InvalidAnswer),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", True, InvalidAnswer),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", False, TimeoutError),
        (b"", False, TimeoutError),
    ],
)
@in_loop
async def test_broken_answers_raise(answer: bytes, closes: bool, error: type[OSError]) -> None:
    async with answering(answer, closes=closes) as (worker, client):
        with pytest.raises(error):
            await read(worker, client)


@in_loop
async def test_unreachable_worker_is_named() -> None:
    async with answering(OK) as (worker, client):
        worker.url = "http://127.0.0.1:1"
        with pytest.raises(WorkerUnreachable, match=r"Cannot connect to host 127.0.0.1:1: connection refused"):
            await read(worker, client)


@in_loop
async def test_header_with_a_line_break_is_not_sent() -> None:
    async with answering(OK) as (worker, client):
        for value in ("a\r\nX: b", "a\n", "\rb"):
            with pytest.raises(ValueError, match="line break"):
                await client.request("GET", worker.url, "/", {"A": value})
        assert not worker.connections
