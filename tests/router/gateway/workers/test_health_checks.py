"""What the router's log says of workers that are not well."""

from __future__ import annotations

import logging

import pytest

from tests.router.gateway.fakes import FakeWorker, eventually, in_loop, routed


@in_loop
async def test_the_log_says_what_an_unhealthy_worker_answers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with FakeWorker() as worker, routed(worker) as live:
            worker.healthy = False
            await eventually(lambda: f"worker {worker.url} is unhealthy: it answers 503" in caplog.text)
            worker.healthy = True
            await live.healthy(1)
            await eventually(lambda: caplog.messages[-1] == f"worker {worker.url} is healthy")


@in_loop
async def test_the_log_says_that_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeWorker() as worker:
        pass
    with caplog.at_level(logging.INFO):
        async with routed(worker, healthy=0):
            await eventually(lambda: f"worker {worker.url} is unhealthy: Cannot connect to host" in caplog.text)
