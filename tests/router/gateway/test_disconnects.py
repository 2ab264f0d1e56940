"""Under random disconnects and failures, every counter returns to zero."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.router.gateway.fakes import CHAT, FakeWorker, events, in_loop, leave_early, routed

WORDS = ("die", "head", "after:1", "torn:2", "429", "503", "500", "json", "unended", "json_dies")


@pytest.mark.parametrize("policy", ["request_num", "cache_aware"])
@in_loop
async def test_counters_return_to_zero_after_random_disconnects(policy: str) -> None:
    rng = random.Random(7)
    total = 1000
    settings = {"policy": policy, "circuit_open_secs": 0.01, "circuit_max_open_secs": 0.02}
    async with (
        FakeWorker("a") as a,
        FakeWorker("b") as b,
        FakeWorker("c") as c,
        routed(a, b, c, router=settings) as live,
    ):
        for worker in (a, b, c):
            worker.pause = 0.001
        gate = asyncio.Semaphore(40)
        outcomes: dict[str, int] = {"whole": 0, "failed": 0, "refused": 0, "left": 0}

        async def ask() -> None:
            async with gate:
                if rng.random() < 0.2:
                    rng.choice((a, b, c)).script.append(rng.choice(WORDS))
                if rng.random() < 0.25:
                    outcomes["left"] += 1
                    await leave_early(live, rng)
                    return
                status, headers, body = await live.post(body={"messages": [{"role": "user", "content": "x" * 300}]})
                if status != 200:
                    assert status in (429, 500, 502, 503)
                    outcomes["refused"] += 1
                elif headers["Content-Type"].startswith("application/json") or events(body)[-1] == "[DONE]":
                    outcomes["whole"] += 1
                else:
                    assert "worker_lost" in events(body)[-1]
                    outcomes["failed"] += 1

        await asyncio.gather(*(ask() for _ in range(total)))
        assert sum(outcomes.values()) == total and outcomes["left"] > 200 and outcomes["whole"] > 400
        await live.wait_until_idle()
        await asyncio.sleep(0.05)
        assert a.running == b.running == c.running == 0
        status = await live.status()
        assert status["total"] == {"requests": 0, "waiting": 0, "prefill_tokens": 0}
        assert status["faults"] == 0 and status["departed"] == []


@in_loop
async def test_restarted_worker_starts_at_zero_while_old_requests_end() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        worker.goes_on.clear()
        running = asyncio.create_task(live.post(CHAT))
        while not worker.running:
            await asyncio.sleep(0.01)
        worker.instance = "w-2"
        while live.router.workers()[0].incarnation == 1:
            await asyncio.sleep(0.01)
        shown = live.router.snapshot()
        assert shown.workers[0].load.requests == 0 and shown.total.requests == 1
        worker.goes_on.set()
        assert events((await running)[2])[-1] == "[DONE]"
