"""A prefill/decode pair serves one request: routing, reported outcomes, and counters."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fd_core.disagg.ticket import OUTCOME_HEADER, TICKET_HEADER, sign_ticket
from fd_core.router.selection import IDLE
from tests.router.gateway.fakes import (
    CHAT,
    COMPLETIONS,
    TICKET_KEY,
    FakeWorker,
    Live,
    events,
    eventually,
    in_loop,
    routed,
    turn,
)

PROMPT = {"prompt": "the same long beginning of every prompt, " * 20, "stream": True}
AWARE = {"policy": "cache_aware", "prefill_policy": "cache_aware", "decode_policy": "request_num"}


def tallies(live: Live) -> dict[str, tuple[int, ...]]:
    """Return served, failed, declined, unused and left, by role."""
    roles = live.router.snapshot().roles
    return {role: (t.served, t.failed, t.declined, t.unused, t.left) for role, t in roles.items() if t.selected}


def blocks(live: Live) -> dict[str, int]:
    return {each.worker.role: each.index_blocks for each in live.router.snapshot().workers}


@in_loop
async def test_pair_serves_and_ticket_names_the_prefill_worker() -> None:
    async with (
        FakeWorker("p", role="prefill") as p,
        FakeWorker("d", role="decode") as d,
        routed(p, d, router=AWARE) as live,
    ):
        status, headers, body = await live.post(COMPLETIONS, PROMPT, X_Request_Id="trace-1")
        assert (status, events(body)[-1], headers[OUTCOME_HEADER]) == (200, "[DONE]", "transferred")
        assert d.peers == ["127.0.0.1:7001"] and d.seen[0][1]["X-Request-Id"] == "trace-1"
        assert p.seen == [], "the router sent a prompt to the prefill worker itself"
        assert tallies(live) == {"prefill": (1, 0, 0, 0, 0), "decode": (1, 0, 0, 0, 0)}
        assert blocks(live)["prefill"] > 0 and blocks(live)["decode"] == 0
        await live.post(COMPLETIONS, PROMPT)
        assert d.peers[1] == "127.0.0.1:7001" and live.router.snapshot().roles["prefill"].hit_blocks > 0


@pytest.mark.parametrize("path", ["/v1/update_weights", "/sleep?level=2", "/v1/load_lora_adapter"])
@in_loop
async def test_changes_reach_both_workers_of_a_pair(path: str) -> None:
    async with (
        FakeWorker("p", role="prefill", usual="json") as p,
        FakeWorker("d", role="decode", usual="json") as d,
        routed(p, d) as live,
    ):
        assert (await live.post(path, {"model_path": "step-1"}))[0] == 200
        assert [each[0] for each in (*p.seen, *d.seen)] == [path, path]
        p.usual = "no_model"
        status, _, answer = await live.post(path, {"model_path": "step-1"})
        changed = f"({d.url} changed, but not {p.url}: repeat the request, or revert it)"
        assert status == 404 and changed in json.loads(answer)["error"]["message"]
        p.usual = "die"
        status, _, answer = await live.post(path, {"model_path": "step-1"})
        assert (
            status == 503 and f"not every worker responded: {d.url} changed" in json.loads(answer)["error"]["message"]
        )


@in_loop
async def test_unloading_succeeds_though_a_worker_lacks_the_adapter() -> None:
    body = {"lora_name": "x"}
    async with (
        FakeWorker("p", role="prefill", usual="no_model") as p,
        FakeWorker("d", role="decode", usual="json") as d,
        routed(p, d) as live,
    ):
        assert (await live.post("/v1/unload_lora_adapter", body))[0] == 200
        assert (await live.post("/v1/load_lora_adapter", body))[0] == 404
        d.usual = "no_model"
        assert (await live.post("/v1/unload_lora_adapter", body))[0] == 404


@in_loop
async def test_forged_ticket_headers_are_removed() -> None:
    async with FakeWorker("p", role="prefill") as p, FakeWorker("d", role="decode") as d, FakeWorker("m") as m:
        forged = {TICKET_HEADER: sign_ticket(TICKET_KEY, "mine", "10.0.0.1:22"), OUTCOME_HEADER: "transferred"}
        async with routed(m) as live, live.client.post(live.url + CHAT, json={}, headers=forged) as answer:
            assert answer.status == 200
        async with routed(p, d) as live:
            forged["X-Request-Id"] = "mine"
            async with live.client.post(live.url + CHAT, json={}, headers=forged) as answer:
                assert answer.status == 200
        assert TICKET_HEADER not in m.seen[0][1] and OUTCOME_HEADER not in m.seen[0][1]
        assert d.peers == ["127.0.0.1:7001"] and OUTCOME_HEADER not in d.seen[0][1]


@pytest.mark.parametrize(
    ("outcome", "prefill", "held"),
    [
        ("transferred", (1, 0, 0, 0, 0), True),
        ("held", (0, 0, 0, 1, 0), False),
        ("refused", (0, 0, 1, 0, 0), False),
        ("lost", (0, 1, 0, 0, 0), False),
        ("expired", (0, 1, 0, 0, 0), False),
        ("damaged", (0, 1, 0, 0, 0), False),
        ("aborted", (0, 0, 0, 1, 0), False),
        ("no such word", (0, 0, 0, 1, 0), False),
        (None, (0, 0, 0, 1, 0), False),
    ],
)
@in_loop
async def test_decode_worker_reports_the_prefill_outcome(
    outcome: str | None, prefill: tuple[int, ...], held: bool
) -> None:
    async with (
        FakeWorker("p", role="prefill") as p,
        FakeWorker("d", role="decode") as d,
        routed(p, d, router=AWARE) as live,
    ):
        d.outcome = outcome
        status, headers, body = await live.post(COMPLETIONS, PROMPT)
        assert (status, events(body)[-1]) == (200, "[DONE]"), "the decode worker computes missing KV itself"
        assert headers.get(OUTCOME_HEADER) == outcome
        assert tallies(live) == {"prefill": prefill, "decode": (1, 0, 0, 0, 0)}
        assert (blocks(live)["prefill"] > 0) == held
        families = text_string_to_metric_families((await live.get("/metrics"))[1].decode())
        samples = [sample for family in families for sample in family.samples]
        (transfers,) = (each for each in samples if each.name == "fdcore_router_transfers_total")
        known = prefill != (0, 0, 0, 1, 0) or outcome in ("held", "aborted")
        assert (transfers.labels, transfers.value) == ({"outcome": outcome if known else "not_told"}, 1)
        counted = {
            s.labels["role"]: s.value for s in samples if s.labels.get("outcome") == "served" and "role" in s.labels
        }
        assert counted == {"mixed": 0, "prefill": prefill[0], "decode": 1}
        assert (await live.status())["modes"] == {"mixed": 0, "pd": 1, "alone": 0}


@in_loop
async def test_failing_prefill_worker_is_avoided() -> None:
    async with (
        FakeWorker("p", role="prefill") as p,
        FakeWorker("q", role="prefill") as q,
        FakeWorker("d", role="decode") as d,
        routed(p, q, d, router={"circuit_failure_threshold": 1, "circuit_open_secs": 60.0}) as live,
    ):
        p.kv_port, q.kv_port = 7001, 7002
        await eventually(lambda: {each.kv_port for each in live.router.snapshot().workers} == {7001, 7002, None})
        d.outcome = "lost"
        await live.post()
        d.outcome = "transferred"
        for _ in range(4):
            await live.post()
        assert len(set(d.peers[1:])) == 1 and d.peers[0] not in d.peers[1:]


@pytest.mark.parametrize("word", ["die", "head", "500", "429", "503", "404"])
@in_loop
async def test_decode_worker_failing_before_first_byte_is_replaced(word: str) -> None:
    """The only prefill worker may serve the next attempt: it was not at fault."""
    async with (
        FakeWorker("p", role="prefill") as p,
        FakeWorker("c", role="decode") as c,
        FakeWorker("d", role="decode") as d,
        routed(p, c, d, router={"decode_policy": "round_robin"}) as live,
    ):
        min((c, d), key=lambda worker: worker.url).script.append(word)
        status, _, body = await live.post()
        assert (status, events(body)[-1]) == (200, "[DONE]")
        assert (len(c.seen), len(d.seen)) == (1, 1) and None not in (*c.peers, *d.peers)
        failed = live.router.snapshot().roles["decode"].failed
        assert failed == (0 if word in ("429", "503", "404") else 1)


@in_loop
async def test_first_byte_ends_prefill_and_disconnect_is_reported() -> None:
    async with FakeWorker("p", role="prefill") as p, FakeWorker("d", role="decode") as d, routed(p, d) as live:
        d.pause, d.chunks = 0.05, 100
        async with live.client.post(live.url + CHAT, json={"messages": [turn("hi" * 100)], "stream": True}) as answer:
            await answer.content.readany()
            loads = {each.worker.role: each.load for each in live.router.snapshot().workers}
            assert loads["prefill"] == IDLE and loads["decode"].requests == 1
            answer.close()
        await live.wait_until_idle()
        d.pause = 0.0
        d.script.append("after:2")
        assert b"worker_lost" in (await live.post())[2]
        assert tallies(live) == {"prefill": (2, 0, 0, 0, 0), "decode": (0, 1, 0, 0, 1)}


@in_loop
async def test_mixed_workers_and_pairs_serve_together() -> None:
    async with (
        FakeWorker("m") as m,
        FakeWorker("p", role="prefill") as p,
        FakeWorker("d", role="decode") as d,
        routed(m, p, d) as live,
    ):
        m.pause = d.pause = 0.05
        await asyncio.gather(*(live.post() for _ in range(6)))
        assert m.seen and d.seen and len(d.peers) == len(d.seen)
        assert all(TICKET_HEADER not in headers for _, headers, _ in m.seen)


@in_loop
async def test_worker_with_wrong_role_is_logged_once_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeWorker("m") as m, FakeWorker("x") as x:
        x.reported_role = "prefill"
        async with routed(m, x) as live:
            with caplog.at_level(logging.WARNING):
                await asyncio.sleep(0.3)
            for _ in range(4):
                assert (await live.post())[0] == 200
            assert not x.seen
            assert sum("reports the role prefill" in line for line in caplog.messages) <= 1
            shown = {each["worker"]["url"]: each["unfit"] for each in (await live.status())["workers"]}
            assert "reports the role prefill" in shown[x.url] and not shown[m.url]
            x.reported_role = "<script>"
            await eventually(lambda: "strange" in max(each.unfit for each in live.router.snapshot().workers))
            x.reported_role = "mixed"
            await eventually(lambda: not any(each.unfit for each in live.router.snapshot().workers))
            for _ in range(2):
                await live.post()
            assert x.seen


@pytest.mark.parametrize("port", [None, 0, 70_000, "x", "７００１"])
@in_loop
async def test_prefill_worker_without_a_port_is_not_used_yet(port: Any) -> None:
    async with FakeWorker("p", role="prefill") as p, FakeWorker("d", role="decode") as d:
        p.kv_port = port
        async with routed(p, d) as live:
            assert (await live.post())[0] == 200 and (await live.get("/ready"))[0] == 200
            p.kv_port = 7009
            await eventually(lambda: 7009 in {each.kv_port for each in live.router.snapshot().workers})
            assert (await live.post())[0] == 200 and d.peers == ["127.0.0.1:7009"]
            assert len(d.seen) == 2, "the first request had no prefill worker"


@in_loop
async def test_decode_workers_prefill_if_no_prefill_worker_is_available(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    circuit = {"circuit_failure_threshold": 1, "circuit_open_secs": 3600.0, "circuit_max_open_secs": 3600.0}
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[-1])
    monkeypatch.setattr("fd_core.router.gateway.requests.forwarding.time", clock)
    caplog.set_level(logging.INFO, "fd_core.router.gateway.requests.state")
    async with (
        FakeWorker("p", role="prefill") as p,
        FakeWorker("d", role="decode") as d,
        routed(p, d, router=circuit) as live,
    ):
        d.outcome = "lost"
        await live.post()
        d.outcome = None
        for _ in range(3):
            assert (await live.post())[0] == 200
        assert d.peers == ["127.0.0.1:7001"] and len(d.seen) == 4
        ahead.append(7200.0)
        d.outcome = "transferred"
        await live.post()
        assert d.peers == ["127.0.0.1:7001"] * 2
        assert ["themselves" in line or "pairs" in line for line in caplog.messages].count(True) == 2, (
            "each is logged once"
        )
        text = (await live.get("/metrics"))[1].decode()
        assert 'fdcore_router_attempts_total{mode="alone"} 3.0' in text
        assert (await live.status())["modes"] == {"mixed": 0, "pd": 2, "alone": 3}


@in_loop
async def test_prefill_worker_may_have_an_ipv6_address() -> None:
    async with FakeWorker("p", role="prefill") as p, FakeWorker("d", role="decode") as d:
        async with routed(d, healthy=1) as live:
            worker = live.router.register("http://[::1]:1", "prefill", 0.0)
            live.router.health(worker, True, 0.0, role="prefill", kv_port=7001)
            assert (await live.post())[0] == 200
        assert d.peers == ["[::1]:7001"] and not p.seen
