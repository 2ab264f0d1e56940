"""A gateway follows what workers tell, and falls back on what they served when that ends."""

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


class TellingWorker(FakeWorker):
    """Tells what a test has its log say."""

    def __init__(self, name: str = "w") -> None:
        super().__init__(name)
        self.log = KVEventLog(SIZE)
        self.reading = READING
        self.asked: list[str | None] = []
        self.answer: Callable[[], web.Response] | None = None

    def tell(self, *events: KVEvent) -> None:
        self.log.extend(events)

    def _itself(self) -> dict[str, str]:
        return super()._itself() | {OFFER_HEADER: "1"}

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != KV_EVENTS_PATH:
            return await super()._handle(request)
        self.asked.append(request.headers.get("Authorization"))
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
    """Return how many blocks of a prompt got credit."""
    before = live.router.snapshot().tally.hit_blocks
    await live.post(COMPLETIONS, {"prompt": prompt, "stream": True, **more})
    return live.router.snapshot().tally.hit_blocks - before


@in_loop
async def test_a_gateway_knows_what_a_worker_holds() -> None:
    async with TellingWorker() as worker:
        worker.tell(stored("abcdefghijklmnop"))
        async with routed(worker, router=CACHED, text=TEXT) as live:
            await eventually(lambda: held(live) == 4)
            assert await hits(live, "abcdefghijklmnop" * 2) == 2
            assert await hits(live, "abcdefgh" * 4) == 1
            worker.tell(Removed((b"abcdefgh",)), stored("01234567"))
            await eventually(lambda: held(live) == 5)
            assert await hits(live, "abcdefghijklmnop") == 0, "what was evicted, and served since, got credit"
            assert await hits(live, "0123456789") == 1
            assert await hits(live, "0123456789", cache_salt="t") == 0
            worker.log.restart()
            await eventually(lambda: held(live) == 0)
            shown = (await live.status())["workers"][0]
            assert shown["held_blocks"] == 0 and shown["kv_events"] == 5
            metrics = (await live.get("/metrics"))[1].decode()
            assert f'fdcore_router_worker_tells_kv{{role="mixed",worker="{worker.url}"}} 1.0' in metrics
            assert f'fdcore_router_worker_kv_events_total{{role="mixed",worker="{worker.url}"}} 5.0' in metrics
        assert set(worker.asked) == {f"Bearer {SECRET}"}


@in_loop
async def test_a_gateway_knows_what_each_engine_of_a_worker_holds() -> None:
    async with TellingWorker() as worker:
        worker.log = KVEventLog(SIZE, engines=2)
        worker.tell(stored("abcdefgh"))
        worker.log.extend([stored("abcdefghijklmnop")], 1)
        async with routed(worker, router=CACHED, text=TEXT) as live:
            await eventually(lambda: held(live) == 6)
            assert await hits(live, "abcdefghijklmnop") == 2
            worker.log.restart(1)
            await eventually(lambda: held(live) == 2)
            assert await hits(live, "abcdefghijklmnop") == 1


@in_loop
async def test_when_the_stream_breaks_what_was_served_counts_until_it_is_back() -> None:
    async with TellingWorker() as worker, routed(worker, router=CACHED, text=TEXT) as live:
        await eventually(lambda: held(live) == 0)
        assert (await hits(live, "x" * 16), await hits(live, "x" * 16)) == (0, 0), "it does not hold what it served"
        worker.answer = lambda: web.Response(status=500)
        worker.tell(Cleared())
        await eventually(lambda: held(live) is None)
        assert await hits(live, "x" * 16) == 2
        worker.answer = None
        worker.tell(stored("abcd"))
        await eventually(lambda: held(live) == 1)
        assert await hits(live, "x" * 16) == 0


@in_loop
async def test_another_process_at_the_same_address_begins_with_nothing() -> None:
    async with TellingWorker() as worker:
        worker.tell(stored("abcdefgh"))
        async with routed(worker, router=CACHED, text=TEXT) as live:
            await eventually(lambda: held(live) == 2)
            first = live.router.workers()[0]
            worker.instance = "w-2"
            worker.log = KVEventLog(SIZE)
            worker.tell(stored("12345678" * 2))
            await eventually(lambda: live.router.workers()[0] != first and held(live) == 4)
            assert not live.router.reported_kv.apply(first, stored("abcd"))


def page(**changes: Any) -> Callable[[], web.Response]:
    values = {"instance": "w-1", "reading": READING, "block_size": SIZE, "next": 1, "events": (Cleared(),)}
    return lambda: web.Response(body=msgspec.msgpack.encode(KVPage(**(values | changes))))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda: web.Response(status=403), "does not take the secret"),
        (lambda: web.Response(status=404), "answered 404"),
        (lambda: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}), "answered 302"),
        (lambda: web.Response(body=b"private"), "cannot be read"),
        (lambda: web.Response(body=b"x" * 2000), "more than"),
        (page(reading="otherwise"), "is not that of --tokenizer"),
        (page(block_size=0), "blocks of 0 tokens"),
        (page(events=(Stored(b"private", (b"k",), ids([1] * SIZE)),)), "does not hold"),
    ],
)
def test_what_cannot_be_followed_is_said_once(
    answer: Callable[[], web.Response], says: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_checks, "_PAUSES", (0.01,))
    monkeypatch.setattr(health_checks, "_MAX_EVENT_BYTES", 1000)

    async def scenario() -> None:
        async with TellingWorker() as worker:
            worker.answer = answer
            async with routed(worker, router=CACHED, text=TEXT) as live:
                await eventually(lambda: len(worker.asked) > 3)
                assert held(live) is None
                assert await hits(live, "x" * 16) == 0 and await hits(live, "x" * 16) == 2, "served prompts count"
        said = [record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage()]
        assert len(said) == 1 and says in said[0]
        assert "private" not in caplog.text and SECRET not in caplog.text

    with caplog.at_level("DEBUG"):
        asyncio.run(scenario())


@pytest.mark.parametrize(("silent", "warnings"), [(1, 0), (2, 1)])
def test_one_answer_that_does_not_come_is_no_reason_to_warn(
    silent: int, warnings: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has just begun may be slow once."""
    monkeypatch.setattr(health_checks, "_PAUSES", (0.01,))
    ask, asked = health_checks._Follower._ask, itertools.count()

    async def late(follower: Any, last: KVPage | None) -> KVPage:
        if next(asked) < silent:
            raise TimeoutError
        return await ask(follower, last)

    monkeypatch.setattr(health_checks._Follower, "_ask", late)

    async def scenario() -> None:
        async with TellingWorker() as worker:
            worker.tell(stored("abcd"))
            async with routed(worker, router=CACHED, text=TEXT) as live:
                await eventually(lambda: held(live) == 1)

    with caplog.at_level("WARNING"):
        asyncio.run(scenario())
    assert caplog.text.count("it does not answer (TimeoutError)") == warnings


@pytest.mark.parametrize(
    "settings",
    [{"router": {"policy": "request_num"}, "text": TEXT}, {"router": CACHED, "text": None}, {"router_secret": ""}],
)
def test_nobody_is_followed_in_vain(settings: dict[str, Any]) -> None:
    """The policy does not look at prefixes, prompts are not compared by tokens, or there is no secret to show."""

    async def scenario() -> None:
        async with TellingWorker() as worker, FakeWorker() as silent:
            async with routed(worker, silent, **({"router": CACHED, "text": TEXT} | settings)) as live:
                await asyncio.sleep(0.3)
                assert held(live) is None
            assert not worker.asked

    asyncio.run(scenario())


@in_loop
async def test_the_secret_is_shown_to_nobody_who_does_not_offer() -> None:
    async with FakeWorker() as silent, routed(silent, router=CACHED, text=TEXT):
        await asyncio.sleep(0.2)
        assert not silent.seen


def test_real_servers_get_no_credit_for_what_they_evicted(tmp_path: Path) -> None:
    """One worker with room for four prompts: a fifth and sixth push the first out, and the router knows."""
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
        until(lambda: value(url, "fdcore_router_worker_tells_kv") == 1, log)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def credit(prompt: str) -> tuple[int, int]:
            """Return the blocks that got credit, and the tokens that the worker really found."""
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
        assert credit(prompts[0]) == (0, 0), "the router believed in blocks that are gone"
        assert credit(prompts[-1])[0] == 3
        assert status(url)["workers"][0]["kv_events"] > 8
        shown = json.dumps(status(url)) + log.read_text() + (tmp_path / "worker").read_text()
        assert "a-secret" not in shown and "7 7 7" not in shown
