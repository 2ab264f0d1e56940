"""Log messages about unhealthy workers."""

from __future__ import annotations

import logging

import pytest

from tests.router.gateway.fakes import FakeWorker, eventually, in_loop, routed


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
async def test_log_reports_a_refused_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeWorker() as worker:
        pass
    with caplog.at_level(logging.INFO):
        async with routed(worker, healthy=0):
            await eventually(lambda: f"worker {worker.url} is unhealthy: Cannot connect to host" in caplog.text)
