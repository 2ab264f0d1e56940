"""A client disconnect frees its resources, once and soon."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable

import pytest

from fd_core.ops.polled_timeout import PolledTimeout
from fd_core.server.stream.response_format import UntilDisconnect
from tests.server.fakes import FakeClient, LiveServer, live, samples

PATH = "/v1/completions"


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; the limit only ends a test that hangs."""
    limit = PolledTimeout(60)
    while not condition():
        assert not limit.expired(), "timed out"
        time.sleep(0.005)


async def leave(port: int, body: dict, read: int, begun: Callable[[], bool] | None = None) -> None:
    """Send a request, read at least this many bytes of the answer, and disconnect.

    Without bytes to read, disconnect once `begun` is true, or soon.
    """
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    if read:
        await reader.readexactly(read)
    elif begun is not None:
        await asyncio.to_thread(eventually, begun)
    else:
        await asyncio.sleep(0.05)
    writer.close()


@pytest.mark.parametrize(
    ("stream", "read", "n"), [(True, 300, 1), (True, 300, 3), (True, 0, 1), (False, 0, 1), (False, 0, 3)]
)
def test_disconnect_aborts_every_choice_once(server: LiveServer, stream: bool, read: int, n: int) -> None:
    client: FakeClient = server.client
    client.reply = lambda _: b"x" * 390
    client.pause_after = 20 if read else 0
    body = {"prompt": "a", "max_tokens": 390, "stream": stream, "n": n}
    asyncio.run(leave(server.port, body, read, lambda: len(client.live) == n))
    eventually(lambda: len(client.aborts) == n)
    assert sorted(client.aborts) == sorted(spec.request_id for spec in client.specs)
    eventually(lambda: server.call(lambda: client.active_requests) == 0)
    assert not client.live
    time.sleep(0.05)
    assert len(client.aborts) == n


def test_disconnect_is_noticed_while_the_writer_is_blocked(server: LiveServer) -> None:
    """A client that does not read fills the buffers; the blocked writer must still notice the disconnect."""
    client: FakeClient = server.client
    client.reply = lambda _: b"x" * 390
    client.pause_after = 60
    body = {"prompt": "a", "max_tokens": 390, "stream": True, "n": 100, "logprobs": 20}

    async def stall() -> None:
        data = json.dumps(body).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        writer.transport.pause_reading()
        await asyncio.to_thread(eventually, lambda: [done for _, done in client.live.values()] == [60] * 100)
        await asyncio.sleep(0.1)
        writer.transport.abort()

    asyncio.run(stall())
    eventually(lambda: server.call(lambda: client.active_requests) == 0)
    assert len(client.aborts) == len(set(client.aborts))


@pytest.mark.timing
def test_many_streams_with_random_disconnects_leak_nothing() -> None:
    """64 streams; about half disconnect midway. Every gauge returns to its value before."""
    chance = random.Random(7)
    with live(lambda: FakeClient("y" * 200, step_seconds=0.002, max_num_seqs=64), drain_seconds=30.0) as server:
        client: FakeClient = server.client

        async def one() -> None:
            body = {"prompt": "a", "max_tokens": 120, "stream": chance.random() < 0.7, "n": chance.choice([1, 1, 2])}
            if chance.random() < 0.5:
                await leave(server.port, body, chance.choice([0, 200, 500]) if body["stream"] else 0)
            else:
                await asyncio.to_thread(server.post, PATH, body)

        async def all_of_them() -> None:
            await asyncio.gather(*(one() for _ in range(64)))

        asyncio.run(all_of_them())
        eventually(lambda: server.call(lambda: client.active_requests) == 0)
        counts = samples(server)
        assert counts["fdcore_generations_total[error]"] == counts["fdcore_generations_total[abort]"] == 0
        assert counts["fdcore_generations_total[disconnect]"] == len(client.aborts) > 0
        assert sum(v for k, v in counts.items() if k.startswith("fdcore_generations_total")) == len(client.specs)
        assert len(client.aborts) == len(set(client.aborts))
        # the drain waits for active requests: there must be none
        start = time.monotonic()
        server.stop()
        server.join()
        assert time.monotonic() - start < 5


def test_block_is_cancelled_and_the_task_continues() -> None:
    async def scenario() -> list[str]:
        seen = []
        left = asyncio.Event()

        async def receive() -> dict[str, str]:
            await left.wait()
            return {"type": "http.disconnect"}

        asyncio.get_running_loop().call_later(0.01, left.set)
        async with UntilDisconnect(receive) as client:
            try:
                await asyncio.sleep(10)
            finally:
                seen.append("cleaned")
        seen.append(f"gone={client.disconnected}")
        await asyncio.sleep(0)
        seen.append("continued")
        return seen

    assert asyncio.run(scenario()) == ["cleaned", "gone=True", "continued"]


def test_external_cancellation_is_not_swallowed() -> None:
    async def scenario() -> None:
        async def receive() -> dict[str, str]:
            await asyncio.sleep(10)
            return {"type": "http.disconnect"}

        async def work() -> None:
            async with UntilDisconnect(receive):
                await asyncio.sleep(10)

        task = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_error_within_the_block_is_raised() -> None:
    async def scenario() -> None:
        async def receive() -> dict[str, str]:
            await asyncio.sleep(10)
            return {"type": "http.disconnect"}

        async with UntilDisconnect(receive):
            raise ValueError("unchanged")

    with pytest.raises(ValueError, match="unchanged"):
        asyncio.run(scenario())
