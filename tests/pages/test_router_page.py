"""The router's page over HTTP: its script runs in node against a live gateway."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.pages.playing import needs_node, play
from tests.router.gateway.fakes import FakeWorker, eventually, in_loop, routed

pytestmark = needs_node


@in_loop
async def test_dead_worker_is_shown_with_its_reason(tmp_path: Path) -> None:
    async with FakeWorker() as worker, FakeWorker() as sick, FakeWorker() as lost, routed(worker, sick, lost) as live:
        sick.healthy, sick.health_body = False, '{"status": "dead", "reason": "the engine is not running"}'
        live.router.deregister(lost.url, 0.0)
        live.router.register("http://127.0.0.1:1", "mixed", 0.0)
        await eventually(lambda: sum(each.state.value == "unhealthy" for each in live.router.snapshot().workers) == 2)
        page = (await live.get("/"))[1]
        shown = await asyncio.to_thread(play, tmp_path, page, "router_workers", live.url)
    assert shown["state"] == "Ready."
    first, second = (re.sub(r"for \d+ s", "for N s", text) for text in shown["problems"])
    assert first == f"{sick.url}: unhealthy for N s: HTTP status 503: the engine is not running."
    assert second.startswith("http://127.0.0.1:1: unhealthy for N s: Cannot connect to host 127.0.0.1:1: ")
    assert [(name, bool(text[0])) for name, text in shown["cards"]] == [
        ("worker", False),
        ("worker out", True),
        ("worker out", True),
    ]
