"""Names, types and labels of every metric are a public contract: external dashboards and alerts use them."""

from __future__ import annotations

import asyncio

import pytest

from fd_core.router.gateway.requests.route_requests import RouteRequestReader
from fd_core.router.gateway.requests.state import GatewayMetrics
from fd_core.router.selection import RouteRequest
from tests.router.gateway.fakes import COMPLETIONS, FakeWorker, in_loop, routed
from tests.router.helpers import router_of

WORKER = ["role", "worker"]
PROMISED = {
    "background_failures": ("counter", ["task"]),
    "accept_errors": ("counter", []),
    "answers": ("counter", ["path", "status"]),
    "attempts": ("counter", ["mode"]),
    "attempts_lost": ("counter", []),
    "bodies_refused": ("counter", []),
    "body_memory_bytes": ("gauge", []),
    "choosing_seconds": ("histogram", []),
    "connections": ("gauge", []),
    "connections_closed": ("counter", ["reason"]),
    "connections_limit": ("gauge", []),
    "connections_refused": ("counter", []),
    "connections_refused_of_address": ("counter", []),
    "disconnects": ("counter", []),
    "faults": ("counter", []),
    "first_byte_seconds": ("histogram", []),
    "hit_blocks": ("counter", []),
    "outcomes": ("counter", ["outcome", "role"]),
    "prefill_tokens": ("gauge", []),
    "prompt_blocks": ("counter", []),
    "refused": ("counter", ["reason"]),
    "key_refusals": ("counter", ["key", "limit"]),
    "requests": ("gauge", []),
    "requests_waiting": ("gauge", []),
    "retries": ("counter", []),
    "streams_broken": ("counter", []),
    "tls_handshakes_failed": ("counter", []),
    "transfers": ("counter", ["outcome"]),
    "worker_circuit_closed": ("gauge", WORKER),
    "worker_declined": ("counter", WORKER),
    "worker_failed": ("counter", WORKER),
    "worker_healthy": ("gauge", WORKER),
    "worker_held_blocks": ("gauge", WORKER),
    "worker_hit_blocks": ("counter", WORKER),
    "worker_index_blocks": ("gauge", WORKER),
    "worker_kv_events": ("counter", WORKER),
    "worker_left": ("counter", WORKER),
    "worker_prefill_tokens": ("gauge", WORKER),
    "worker_prompt_blocks": ("counter", WORKER),
    "worker_requests": ("gauge", WORKER),
    "worker_requests_waiting": ("gauge", WORKER),
    "worker_selected": ("counter", WORKER),
    "worker_served": ("counter", WORKER),
    "worker_reports_kv": ("gauge", WORKER),
    "worker_tells_kv": ("gauge", WORKER),
    "worker_unused": ("counter", WORKER),
}


def test_metrics_match_the_contract_and_every_help_is_a_sentence() -> None:
    metrics = GatewayMetrics(router_of(mixed=1))
    metrics.answers[COMPLETIONS, 200] += 1
    metrics.counts.transfers["transferred"] += 1
    metrics.refusals["alice", "tokens"] += 1
    families = list(metrics.collect())
    labels = {one.name: {name for sample in one.samples for name in sample.labels} - {"le"} for one in families}
    # Nothing failed or was rejected: no sample shows the label.
    labels |= {"fdcore_router_background_failures": {"task"}, "fdcore_router_refused": {"reason"}}
    shown = {one.name: (one.type, sorted(labels[one.name])) for one in families}
    assert shown == {f"fdcore_router_{name}": what for name, what in PROMISED.items()}
    helps = [family.documentation for family in families]
    assert [text for text in helps if not (text[0].isupper() or text[0] == "1") or not text.endswith(".")] == []


@in_loop
async def test_latency_is_measured_from_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    read = RouteRequestReader.read

    async def read_slowly(self: RouteRequestReader, *request: bytes | str | None) -> RouteRequest:
        await asyncio.sleep(0.2)
        return await read(self, *request)  # type: ignore[arg-type]

    monkeypatch.setattr(RouteRequestReader, "read", read_slowly)
    async with FakeWorker() as worker, routed(worker) as live:
        await live.post(COMPLETIONS, {"prompt": "x"})
        lines = (await live.get("/metrics"))[1].decode().splitlines()
    seconds = dict(line.split() for line in lines if line.startswith("fdcore_router_") and "_seconds_sum" in line)
    assert float(seconds["fdcore_router_choosing_seconds_sum"]) >= 0.2
    assert float(seconds["fdcore_router_first_byte_seconds_sum"]) >= 0.2
