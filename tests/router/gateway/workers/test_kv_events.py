"""A gateway follows the KV events of workers, and falls back to served prompts when the stream fails."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from aiohttp import web

from fd_core.kv.event_log import KVEventLog
from fd_core.router.gateway.workers import health_checks
from fd_core.server.api.admin import KV_EVENTS_PATH, OFFER_HEADER
from fd_core.text.prompt_reader import PromptReader, find_text
from fd_core.types.kv_events import BEGINNING, Cleared, KVEvent, KVPage, Removed, Stored
from tests.kv.following import ids
from tests.router.gateway.fakes import COMPLETIONS, FakeWorker, Live, eventually, in_loop, routed
from tests.router.gateway.test_processes import status, until, value
from tests.server.processes import free_port, running

TEXT = find_text("bytes", offline=True)
READING = PromptReader(TEXT.tokenizer, TEXT.template).fingerprint
SECRET = "a secret of the cluster"
SIZE = 4
CACHED: dict[str, Any] = {"policy": "cache_aware", "cache_block_size": 8}


def stored(text: str, parent: bytes = BEGINNING) -> Stored:
    keys = tuple(text[: end + SIZE].encode() for end in range(0, len(text), SIZE))
    return Stored(parent, keys, ids(TEXT.tokenizer.encode(text)))


class PublishingWorker(FakeWorker):
    """Publishes the events that a test adds to its log."""

    def __init__(self, name: str = "w") -> None:
        super().__init__(name)
        self.log = KVEventLog(SIZE)
        self.reading = READING
        self.requested: list[str | None] = []
        self.answer: Callable[[], web.Response] | None = None

    def publish(self, *events: KVEvent) -> None:
        self.log.extend(events)

    def _itself(self) -> dict[str, str]:
        return super()._itself() | {OFFER_HEADER: "1"}

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != KV_EVENTS_PATH:
            return await super()._handle(request)
        self.requested.append(request.headers.get("Authorization"))
        if self.answer is not None:
            return self.answer()
        after = int(request.query["after"]) if request.query.get("instance") == self.instance else None
        await self.log.wait(after, 5)
        number, events = self.log.read(after)
        page = KVPage(
            instance=self.instance,
            reading=self.reading,
            block_size=SIZE,
            next=number,
            events=events,
            engines=self.log.engines,
        )
        return web.Response(body=msgspec.msgpack.encode(page))


def held(live: Live, index: int = 0) -> int | None:
    return live.router.snapshot().workers[index].held_blocks


async def hits(live: Live, prompt: str, **more: str) -> int:
    """Return the number of blocks of a prompt counted as hits."""
    before = live.router.snapshot().tally.hit_blocks
    await live.post(COMPLETIONS, {"prompt": prompt, "stream": True, **more})
    return live.router.snapshot().tally.hit_blocks - before


@in_loop
async def test_gateway_tracks_the_blocks_of_a_worker() -> None:
    async with PublishingWorker() as worker:
        worker.publish(stored("abcdefghijklmnop"))
        async with routed(worker, router=CACHED, text=TEXT) as live:
            await eventually(lambda: held(live) == 4)
            assert await hits(live, "abcdefghijklmnop" * 2) == 2
            assert await hits(live, "abcdefgh" * 4) == 1
            worker.publish(Removed((b"abcdefgh",)), stored("01234567"))
            await eventually(lambda: held(live) == 5)
            assert await hits(live, "abcdefghijklmnop") == 0, "blocks that were evicted, and served since, got credit"
            assert await hits(live, "0123456789") == 1
            assert await hits(live, "0123456789", cache_salt="t") == 0
            worker.log.restart()
            await eventually(lambda: held(live) == 0)
            shown = (await live.status())["workers"][0]
            assert shown["held_blocks"] == 0 and shown["kv_events"] == 5
            metrics = (await live.get("/metrics"))[1].decode()
            assert f'fdcore_router_worker_reports_kv{{role="mixed",worker="{worker.url}"}} 1.0' in metrics
            assert f'fdcore_router_worker_kv_events_total{{role="mixed",worker="{worker.url}"}} 5.0' in metrics
        assert set(worker.requested) == {f"Bearer {SECRET}"}


@in_loop
async def test_gateway_tracks_the_blocks_of_each_engine() -> None:
    async with PublishingWorker() as worker:
        worker.log = KVEventLog(SIZE, engines=2)
        worker.publish(stored("abcdefgh"))
        worker.log.extend([stored("abcdefghijklmnop")], 1)
        async with routed(worker, router=CACHED, text=TEXT) as live:
            await eventually(lambda: held(live) == 6)
            assert await hits(live, "abcdefghijklmnop") == 2
            worker.log.restart(1)
            await eventually(lambda: held(live) == 2)
            assert await hits(live, "abcdefghijklmnop") == 1


@in_loop
async def test_broken_stream_falls_back_to_served_prompts() -> None:
    async with PublishingWorker() as worker, routed(worker, router=CACHED, text=TEXT) as live:
        await eventually(lambda: held(live) == 0)
        assert (await hits(live, "x" * 16), await hits(live, "x" * 16)) == (0, 0), "served prompts do not count"
        worker.answer = lambda: web.Response(status=500)
        worker.publish(Cleared())
        await eventually(lambda: held(live) is None)
        assert await hits(live, "x" * 16) == 2
        worker.answer = None
        worker.publish(stored("abcd"))
        await eventually(lambda: held(live) == 1)
        assert await hits(live, "x" * 16) == 0


@in_loop
async def test_new_process_at_the_same_address_starts_empty() -> None:
    async with PublishingWorker() as worker:
        worker.publish(stored("abcdefgh"))
        async with routed(worker, router=CACHED, text=TEXT) as live:
            await eventually(lambda: held(live) == 2)
            first = live.router.workers()[0]
            worker.instance = "w-2"
            worker.log = KVEventLog(SIZE)
            worker.publish(stored("12345678" * 2))
            await eventually(lambda: live.router.workers()[0] != first and held(live) == 4)
            assert not live.router.reported_kv.apply(first, stored("abcd"))


def page(**changes: Any) -> Callable[[], web.Response]:
    values = {"instance": "w-1", "reading": READING, "block_size": SIZE, "next": 1, "events": (Cleared(),)}
    return lambda: web.Response(body=msgspec.msgpack.encode(KVPage(**(values | changes))))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: web.Response(status=403), "rejects the secret"),
        (lambda: web.Response(status=404), "HTTP status 404"),
        (lambda: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}), "HTTP status 302"),
        (lambda: web.Response(body=b"private"), "cannot be decoded"),
        (lambda: web.Response(body=b"x" * 2000), "exceeds"),
        (page(reading="otherwise"), "differs from that of --tokenizer"),
        (page(block_size=0), "block size of 0 tokens"),
        (page(events=(Stored(b"private", (b"k",), ids([1] * SIZE)),)), "does not hold"),
    ],
)
def test_unusable_events_are_logged_once(
    answer: Callable[[], web.Response], message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_checks, "_PAUSES", (0.01,))
    monkeypatch.setattr(health_checks, "_MAX_EVENT_BYTES", 1000)

    async def scenario() -> None:
        async with PublishingWorker() as worker:
            worker.answer = answer
            async with routed(worker, router=CACHED, text=TEXT) as live:
                await eventually(lambda: len(worker.requested) > 3)
                assert held(live) is None
                assert await hits(live, "x" * 16) == 0 and await hits(live, "x" * 16) == 2, "served prompts count"
        logged = [record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage()]
        assert len(logged) == 1 and message in logged[0]
        assert "private" not in caplog.text and SECRET not in caplog.text

    with caplog.at_level("DEBUG"):
        asyncio.run(scenario())


@pytest.mark.parametrize(("silent", "warnings"), [(1, 0), (2, 1)])
def test_single_timeout_does_not_warn(
    silent: int, warnings: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has just started may be slow once."""
    monkeypatch.setattr(health_checks, "_PAUSES", (0.01,))
    ask, calls = health_checks._Follower._ask, itertools.count()

    async def late(follower: Any, last: KVPage | None) -> KVPage:
        if next(calls) < silent:
            raise TimeoutError
        return await ask(follower, last)

    monkeypatch.setattr(health_checks._Follower, "_ask", late)

    async def scenario() -> None:
        async with PublishingWorker() as worker:
            worker.publish(stored("abcd"))
            async with routed(worker, router=CACHED, text=TEXT) as live:
                await eventually(lambda: held(live) == 1)

    with caplog.at_level("WARNING"):
        asyncio.run(scenario())
    assert caplog.text.count("no response (TimeoutError)") == warnings


@pytest.mark.parametrize(
    "settings",
    [{"router": {"policy": "request_num"}, "text": TEXT}, {"router": CACHED, "text": None}, {"router_secret": ""}],
)
def test_events_are_not_followed_when_unused(settings: dict[str, Any]) -> None:
    """The policy ignores prefixes, prompts are not compared by tokens, or there is no secret to send."""

    async def scenario() -> None:
        async with PublishingWorker() as worker, FakeWorker() as silent:
            async with routed(worker, silent, **({"router": CACHED, "text": TEXT} | settings)) as live:
                await asyncio.sleep(0.3)
                assert held(live) is None
            assert not worker.requested

    asyncio.run(scenario())


@in_loop
async def test_secret_is_sent_only_to_workers_that_offer_events() -> None:
    async with FakeWorker() as silent, routed(silent, router=CACHED, text=TEXT):
        await asyncio.sleep(0.2)
        assert not silent.seen


def test_evicted_blocks_of_real_servers_get_no_credit(tmp_path: Path) -> None:
    """One worker with room for four prompts: a fifth and a sixth evict the first, and the router notices."""
    secret = tmp_path / "secret"
    secret.write_text("a-secret-of-this-cluster\n")
    port, admin, worker = free_port(), free_port(), free_port()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "route"
    route = ("route", "--port", str(port), "--admin-port", str(admin), "--router-secret-file", str(secret))
    route += ("--policy", "cache_aware", "--tokenizer", "bytes", "--health-check-interval-secs", "0.2")
    serve = ("serve", "null", "--backend", "null", "--num-threads", "1", "--max-model-len", "256", "--num-kv-blocks")
    serve += ("32", "--block-size", "32", "--max-num-seqs", "2", "--port", str(worker))
    serve += ("--router", f"http://127.0.0.1:{admin}", "--router-secret-file", str(secret))
    prompts = [f"{number} " * 100 for number in range(8)]
    with ExitStack() as stack:
        stack.enter_context(running(log, *route))
        stack.enter_context(running(tmp_path / "worker", *serve))
        until(lambda: value(url, "fdcore_router_worker_reports_kv") == 1, log)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def credit(prompt: str) -> tuple[int, int]:
            """Return the blocks counted as hits, and the tokens that the worker really found."""
            before = value(url, "fdcore_router_hit_blocks_total")
            answer = client.completions.create(
                model="null", prompt=prompt, max_tokens=1, extra_body={"ignore_eos": True}
            )
            details = answer.usage.prompt_tokens_details
            return int(value(url, "fdcore_router_hit_blocks_total") - before), details.cached_tokens

        def settled() -> bool:
            known = value(f"http://127.0.0.1:{worker}", "fdcore_kv_blocks_cached")
            return value(url, "fdcore_router_worker_held_blocks") == known

        assert credit(prompts[0]) == (0, 0)
        until(settled, log)
        assert credit(prompts[0]) == (3, 192), "200 tokens: three blocks of 64 for the router, six of 32 for the worker"
        for prompt in prompts[1:]:
            assert credit(prompt) == (0, 0)
        until(settled, log)
        assert credit(prompts[0]) == (0, 0), "the router counted evicted blocks"
        assert credit(prompts[-1])[0] == 3
        assert status(url)["workers"][0]["kv_events"] > 8
        shown = json.dumps(status(url)) + log.read_text() + (tmp_path / "worker").read_text()
        assert "a-secret" not in shown and "7 7 7" not in shown
