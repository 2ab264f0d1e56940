"""Log messages about unhealthy workers."""

from __future__ import annotations

import json
import logging

import pytest

from tests.router.gateway.fakes import QUICK, FakeWorker, Live, eventually, in_loop, routed


def shown(live: Live) -> tuple[str, str]:
    [worker] = live.router.snapshot().workers
    return worker.state.value, worker.failure


@in_loop
async def test_log_shows_the_status_of_an_unhealthy_worker(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with FakeWorker() as worker, routed(worker) as live:
            worker.healthy = False
            await eventually(lambda: f"worker {worker.url} is unhealthy: HTTP status 503" in caplog.text)
            worker.healthy = True
            await live.healthy(1)
            await eventually(lambda: caplog.messages[-1] == f"worker {worker.url} is healthy")


@in_loop
async def test_status_names_the_reason_of_an_unhealthy_worker() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        assert (await live.status())["workers"][0]["failure"] == ""
        for body, reason in (
            ({"status": "dead", "reason": "the engine\nis not running"}, ": the engine is not running"),
            ({"status": "dead", "reason": None}, ""),
            ({"status": "dead", "reason": "x" * 1000}, ": " + "x" * 300),
            (["strange"], ""),
        ):
            worker.health_body, worker.healthy = json.dumps(body), False
            expected = "unhealthy", f"HTTP status 503{reason}"
            await eventually(lambda expected=expected: shown(live) == expected)
        assert (await live.status())["workers"][0]["failure"] == expected[1]
        worker.healthy = True
        await live.healthy(1)
        assert (await live.status())["workers"][0]["failure"] == ""


@in_loop
async def test_silent_worker_is_reported_with_the_timeout() -> None:
    async with FakeWorker() as worker, routed(worker, router=QUICK) as live:
        worker.hangs = True
        await eventually(lambda: shown(live) == ("unhealthy", "no answer within 0.2 s"))


@in_loop
async def test_log_reports_a_refused_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeWorker() as worker:
        pass
    with caplog.at_level(logging.INFO):
        async with routed(worker, healthy=0):
            await eventually(lambda: f"worker {worker.url} is unhealthy: Cannot connect to host" in caplog.text)
            assert ": connection refused" in caplog.text
