"""Every process of a service is restarted in turn, by SIGTERM and under load: no request is lost, no text is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.soak.cluster import Cluster, Node, cluster_of

SERVE = (
    *("null", "--backend", "null", "--max-model-len", "512", "--max-num-seqs", "16", "--num-kv-blocks", "256"),
    *("--num-threads", "1", "--log-level", "info", "--block-size", "16", "--no-batch-api"),
)
ROUTE = ("--health-check-interval-secs", "0.5", "--tokenizer", "bytes")
AT_ONCE = 4
PROMPTS = [f"prompt number {number} " * 4 for number in range(6)]
STALL_SECONDS = 15.0
"""Two slow cores run everything; a lost request hangs for longer."""

AT_LENGTH = pytest.mark.skipif(os.environ.get("FD_HOSTILE") != "1", reason="takes a minute; FD_HOSTILE=1 runs it")


@dataclass
class Count:
    """Results of the requests."""

    requests: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    longest_stall: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {len(self.lost)} lost, {len(self.wrong)} wrong, "
            f"longest stall {self.longest_stall:.2f} s"
        )


class Balancer:
    """Client that polls /ready of each router five times a second, and retries refused connections."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str]) -> None:
        self.session = session
        self.ready = dict.fromkeys(urls, True)
        self._turn = itertools.count()

    async def watch(self) -> None:
        while True:
            for url in self.ready:
                try:
                    async with self.session.get(f"{url}/ready") as answer:
                        self.ready[url] = answer.status == 200
                except aiohttp.ClientConnectorError:
                    self.ready[url] = False
            await asyncio.sleep(0.2)

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: object) -> AsyncIterator[aiohttp.ClientResponse]:
        for _ in range(4):
            urls = [url for url, ready in self.ready.items() if ready] or list(self.ready)
            url = urls[next(self._turn) % len(urls)]
            try:
                answer = await self.session.post(url + path, json=body)
            except aiohttp.ClientConnectorError:
                self.ready[url] = False
                continue
            async with answer:
                yield answer
            return
        raise AssertionError("all routers refuse connections")


def body(prompt: str, stream: bool) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 120, "seed": 7, "temperature": 1.0, "stream": stream, "ignore_eos": True}


async def text_of(balancer: Balancer, prompt: str, stream: bool, count: Count) -> str:
    """Send the request and return the text; raise unless the answer is complete."""
    since = time.monotonic()

    def observe_progress() -> None:
        nonlocal since
        now = time.monotonic()
        count.longest_stall, since = max(count.longest_stall, now - since), now

    async with balancer.post("/v1/completions", body(prompt, stream)) as answer:
        if answer.status != 200:
            raise AssertionError(f"{answer.status}: {await answer.text()}")
        if not stream:
            completion = await answer.json()
            observe_progress()
            return str(completion["choices"][0]["text"])
        text, done = "", False
        async for line in answer.content:
            observe_progress()
            data = line.removeprefix(b"data: ").strip()
            done = done or data == b"[DONE]"
            if line.startswith(b"data: ") and data != b"[DONE]":
                event = json.loads(data)
                assert "error" not in event, event
                text += event["choices"][0]["text"]
        assert done, "the stream broke"
        return text


async def load(balancer: Balancer, golden: dict[str, str], count: Count, stop: asyncio.Event, number: int) -> None:
    for turn in itertools.count(number):
        if stop.is_set():
            return
        prompt = PROMPTS[turn % len(PROMPTS)]
        count.requests += 1
        await asyncio.sleep(0.05)  # leaves the processors to what starts
        try:
            text = await text_of(balancer, prompt, turn % 2 == 0, count)
        except Exception as error:  # noqa: BLE001  # any exception means a lost request
            count.lost.append(f"{type(error).__name__}: {error}")
        else:
            if text != golden.setdefault(prompt, text):
                count.wrong.append(prompt)


@contextlib.asynccontextmanager
async def under_load(urls: Sequence[str]) -> AsyncIterator[Count]:
    count, stop, golden = Count(), asyncio.Event(), {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        balancer = Balancer(session, urls)
        watching = asyncio.create_task(balancer.watch())
        clients = [asyncio.create_task(load(balancer, golden, count, stop, number)) for number in range(AT_ONCE)]
        try:
            await asyncio.sleep(0.5)
            yield count
            await asyncio.sleep(0.5)
            stop.set()
            await asyncio.gather(*clients)
        finally:
            watching.cancel()
            for client in clients:
                client.cancel()
    print(count)
    assert count.requests > 4 * AT_ONCE
    assert not count.lost and not count.wrong, f"{count}\n" + "\n".join([*count.lost[:5], *count.wrong[:5]])
    assert count.longest_stall < STALL_SECONDS, str(count)


async def restart(node: Node) -> None:
    """Send SIGTERM, as a supervisor does, and start the process again once it has exited."""
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(node.process.wait, 60)
    assert code == 0, f"{node.name} ended with {code}:\n{node.log_text()}"
    node.start()


def unblamed(status: object) -> None:
    """Check that no worker's circuit opened and that all counters are zero."""
    assert isinstance(status, dict)
    assert status["faults"] == 0 and status["departed"] == []
    assert {each["circuit"] for each in status["workers"]} == {"closed"}


async def workers_in_turn(cluster: Cluster) -> None:
    async with under_load([cluster.router.url]) as count:
        for node in cluster.workers:
            before = count.requests
            await restart(node)
            await cluster.wait_ready(*cluster.workers)
            assert count.requests > before
    unblamed(await cluster.status())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_rolling_restart_of_workers_loses_no_request(tmp_path: Path, workers: int) -> None:
    async def scenario() -> None:
        async with cluster_of(tmp_path, ("mixed",) * workers, serve=SERVE, pair=(), route=ROUTE) as cluster:
            await workers_in_turn(cluster)

    asyncio.run(asyncio.wait_for(scenario(), 240))


@AT_LENGTH
@pytest.mark.slow
def test_rolling_restart_of_pairs_loses_no_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        roles = ("prefill", "prefill", "decode", "decode")
        async with cluster_of(tmp_path, roles, serve=SERVE, pair=(), route=ROUTE) as cluster:
            await workers_in_turn(cluster)

    asyncio.run(asyncio.wait_for(scenario(), 240))


@AT_LENGTH
@pytest.mark.slow
def test_rolling_restart_of_routers_loses_no_request(tmp_path: Path) -> None:
    """The client uses two routers; it relies on the delay between /ready turning 503 and the end of the listener."""

    async def scenario() -> None:
        route = (*ROUTE, "--drain-delay", "1")
        async with cluster_of(tmp_path, ("mixed",) * 2, serve=SERVE, pair=(), route=route) as cluster:
            workers = [word for node in cluster.workers for word in ("--worker", node.url)]
            port = min(node.port for node in cluster.workers) - 1
            other = Node("router-2", "router", port, ["route", *route, *workers], tmp_path / "router-2.log")
            other.start()
            try:
                await cluster.wait_ready(*cluster.workers)
                second = Cluster(other, cluster.workers, cluster.session)
                await second.wait_ready(*cluster.workers)
                async with under_load([cluster.router.url, other.url]):
                    for each in (cluster, second):
                        await restart(each.router)
                        await each.wait_ready(*cluster.workers)
            finally:
                other.destroy()

    asyncio.run(asyncio.wait_for(scenario(), 240))
