"""Bottleneck of a run: each rule with a synthetic run that only it matches."""

from __future__ import annotations

from typing import Any

import pytest

from fd_core.simulation.costs.naming import profile_named
from fd_core.simulation.planning.limiting import LimitFound, check_margin, limit_of, slo_margin
from fd_core.simulation.planning.shapes import DeploymentShape
from fd_core.simulation.results.report import ReportedRun, reported
from fd_core.simulation.results.slo import parse_slo
from fd_core.simulation.results.summary import ObjectiveCheck, WorkerSample
from tests.simulation.results.made_up import outcome, run_of, waits_of

PROFILE = profile_named("h100:llama-8b")
"""Reads of its weights take about 6 ms per step."""


def shape(prefill: int = 0, rows: int = 64) -> DeploymentShape:
    return DeploymentShape(
        profile="h100:llama-8b",
        ranks=1,
        prefill=prefill,
        decode=prefill,
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
    )


def made(
    slo: str,
    *,
    count: int = 200,
    ttft: float = 0.1,
    tpot: float = 0.01,
    prompt: int = 100,
    output: int = 11,
    end: str = "stop",
    reason: str = "",
    lost: int = 0,
    running: float = 8,
    before: dict[str, float] | None = None,
    between: dict[str, float] | None = None,
    busy: float = 1000.0,
    workers: tuple[str, ...] = ("mixed0",),
    spread: int = 1,
    **counters: float,
) -> ReportedRun:
    """Return a run of equal requests, of which the last `lost` fail, and of equal samples."""
    # Round-robin over `spread` workers.
    done = [
        outcome(
            f"r{at}",
            at,
            at + ttft,
            at + ttft + tpot * (output - 1),
            output,
            prompt=prompt,
            gap=tpot,
            worker=at % spread % len(workers),
        )
        for at in range(count)
    ]
    for at in range(count - lost, count):
        first = at + ttft if end == "failed" else None
        done[at] = outcome(f"r{at}", at, first, at + 1.0, 0, end=end, reason=reason, worker=-1)
    samples = [
        WorkerSample(float(at), worker, 0, int(running), 10, 0) for at in range(count) for worker in range(len(workers))
    ]
    fields: dict[str, Any] = {
        "counters": {"device_busy_seconds": busy, **counters},
        "waits": waits_of(*[({"computing": 0.01} | (before or {}), {"computing": 0.01} | (between or {}))] * count),
        "workers": workers,
        "blocks": (100,) * len(workers),
    }
    return reported(run_of(*done, samples=tuple(samples), **fields), slo=parse_slo(slo))


def limit(run: ReportedRun, **changes: int) -> LimitFound:
    return limit_of(run, shape(**changes), PROFILE, "as asked")


TTFT, TPOT = "ttft_p99=0.05", "tpot_p99=0.005"
PREFILL, PAIR = "compute of prefill", ("prefill0", "decode1")
MANY = tuple(f"mixed{at}" for at in range(40))


@pytest.mark.parametrize(
    ("run", "changes", "what"),
    [
        (made(TTFT, end="refused", reason="no room", lost=5), {}, "refused requests"),
        (made("ttft=1,attainment=0.9", end="refused", reason="no room", lost=30), {}, "refused requests"),
        (made("e2e_p99=9", end="failed", reason="the engine failed", lost=5), {}, "failed requests"),
        (made(TTFT, before={"blocks": 0.06, "slot": 0.01}), {}, "KV blocks"),
        (made(TPOT, between={"blocks": 0.03, "preempted": 0.03, "budget": 0.03}), {}, "KV blocks"),
        (made(TPOT, before={"blocks": 0.06}), {}, "reading weights in decode"),
        (made(TTFT, before={"slot": 0.06}), {}, "slots"),
        (made(TPOT, before={"slot": 0.06}), {}, "reading weights in decode"),
        (made(TPOT, between={"budget": 0.06}), {}, "reading weights in decode"),
        (made(TTFT, before={"front": 0.06}), {}, "the server's front"),
        (made(TTFT, before={"retry": 0.06}), {}, "failed attempts"),
        (made(TTFT, before={"budget": 0.04, "prefix": 0.04, "slot": 0.06}, busy=9, prompt=2000), {}, PREFILL),
        (made(TPOT, between={"transfer": 0.06}, workers=PAIR), {"prefill": 1}, "handing KV over"),
        (made(TPOT, between={"slot": 0.06}, workers=PAIR), {"prefill": 1}, "handing KV over"),
        (made(TTFT, before={"slot": 0.06}, workers=("mixed0", "mixed1"), spread=1), {}, "the router"),
        (made(TTFT, prompt=2000, workers=("mixed0", "mixed1"), spread=1), {}, "the router"),
        (made(TTFT, prompt=2000, workers=("mixed0", "mixed1"), spread=2, busy=9.0), {}, PREFILL),
        (made(TTFT, prompt=2000, busy=9.0), {}, PREFILL),
        (made(TTFT, prompt=2000, busy=900.0), {}, "decodes with prefill"),
        (made(TTFT, prompt=2000, busy=900.0, workers=PAIR), {"prefill": 1}, PREFILL),
        (made("tpot_p99=0.03", tpot=0.05), {}, "prefill between decodes"),
        (made("gap_p99=0.03", tpot=0.05), {}, "prefill between decodes"),
        (made("tpot_p99=0.03", tpot=0.05, workers=PAIR), {"prefill": 1}, "handing KV over"),
        (made(TPOT, running=60, prompt=100_000, tpot=0.4), {}, "reading KV in decode"),
        (made("e2e_p99=0.2", tpot=0.1, ttft=0.01), {}, "prefill between decodes"),
        (made("e2e_p99=0.1", tpot=0.0095, ttft=0.01), {}, "reading weights in decode"),
        (made("e2e_p99=0.1", prompt=2000, ttft=3.0, busy=9.0), {}, PREFILL),
        (made("ttft=0.05,tpot=0.5,attainment=0.9", prompt=2000, busy=9.0), {}, PREFILL),
        (made("ttft=5,tpot=0.005,attainment=0.9"), {}, "reading weights in decode"),
        (made("ttft=5,tpot=0.005,attainment=0.9", tpot=0.1), {}, "prefill between decodes"),
    ],
)
def test_each_rule_names_the_bottleneck_of_its_run(run: ReportedRun, changes: dict[str, int], what: str) -> None:
    found = limit(run, **changes)
    assert found.what == what
    assert found.words.startswith(f"What limits is {what}: as asked, ")
    assert slo_margin(run) < 0


def test_rejection_bottleneck_reports_the_reason() -> None:
    found = limit(made(TTFT, end="refused", reason="the prompt has 9000 tokens", lost=5))
    assert "5 requests were refused, most since the prompt has N tokens" in found.words


def test_few_lost_requests_do_not_limit_a_percentile() -> None:
    assert limit(made(TTFT, prompt=2000, busy=9.0, end="refused", reason="x", lost=1)).what == "compute of prefill"


def test_disconnects_are_attributed_to_another_bottleneck() -> None:
    assert limit(made(TTFT, end="left", lost=20, before={"slot": 9.0})).what == "slots"


def test_slots_are_counted_when_rows_aggregate_workers() -> None:
    assert "up to 8 of 64 slots" in limit(made(TTFT, workers=MANY)).words


@pytest.mark.parametrize(
    ("name", "limit", "value", "margin"),
    [
        ("ttft_p99", 0.5, 0.4, 0.2),
        ("ttft_p99", 0.5, 0.6, -0.2),
        ("attainment", 0.9, 0.95, 0.5),
        ("attainment", 0.9, 0.85, -0.5),
        ("attainment", 1.0, 1.0, 0.0),
        ("attainment", 1.0, 0.98, -0.02),
    ],
)
def test_margin_is_unused_share_of_the_limit(name: str, limit: float, value: float, margin: float) -> None:
    assert check_margin(ObjectiveCheck(name, limit, value, margin >= 0)) == pytest.approx(margin)


def test_run_margin_is_the_smallest_one() -> None:
    assert slo_margin(made("ttft_p99=0.2,tpot_p99=0.0125,e2e_mean=9")) == pytest.approx(0.2, abs=1e-6)
    assert slo_margin(made(TTFT, end="refused", reason="x", lost=20)) < -1e6
    assert slo_margin(made("ttft_p99=1,attainment=0.9", count=0)) == 0
