"""Metrics of a run match their definitions, recomputed here in the simplest way."""

from __future__ import annotations

import math
import statistics
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.simulation.results.report import over_time
from fd_core.simulation.results.slo import parse_slo
from fd_core.simulation.results.summary import Absence, WorkerSample, jain, latencies_of, percentiles, summarize
from tests.simulation.results.made_up import outcome, queued, run_of, waits_of
from tests.speed import slowdown

TIMES = st.floats(0, 1e6, allow_nan=False)


@settings(max_examples=50)
@given(st.lists(TIMES, min_size=1, max_size=200), st.lists(st.floats(0.1, 99.9), min_size=1, max_size=5))
def test_percentiles_match_numpy(values: list[float], shares: list[float]) -> None:
    found = percentiles(np.array(values), shares)
    np.testing.assert_allclose(found, np.percentile(values, shares), rtol=1e-9, atol=1e-9)


@settings(max_examples=50)
@given(st.lists(TIMES | st.just(math.inf), min_size=1, max_size=50), st.floats(0.1, 99.9))
def test_percentile_reaching_lost_requests_is_infinite(values: list[float], share: float) -> None:
    placed, rank = sorted(values), (len(values) - 1) * share / 100
    found = percentiles(np.array(values), [share])[0]
    assert math.isinf(found) == math.isinf(placed[math.ceil(rank)])
    assert placed[math.floor(rank)] <= found <= placed[math.ceil(rank)]


@settings(max_examples=50)
@given(st.lists(st.tuples(TIMES, TIMES, TIMES, st.integers(1, 1000)), min_size=1, max_size=60))
def test_latencies_are_measured_at_the_client(rows: list[tuple[float, float, float, int]]) -> None:
    run = run_of(*(outcome(str(i), at, at + a, at + a + b, n, gap=b) for i, (at, a, b, n) in enumerate(rows)))
    found = summarize(run).latencies
    slow = {
        "ttft": [each.first_token - each.arrived for each in run.outcomes if each.first_token is not None],
        "tpot": [
            (each.ended - each.first_token) / (each.output_tokens - 1)
            for each in run.outcomes
            if each.first_token is not None and each.output_tokens > 1
        ],
        "gap": [each.longest_gap for each in run.outcomes if each.output_tokens > 1],
        "e2e": [each.ended - each.arrived for each in run.outcomes],
    }
    for name, values in slow.items():
        if not values:
            assert name not in found
            continue
        figures = found[name]
        assert (figures.count, figures.max) == (len(values), max(values))
        assert figures.mean == pytest.approx(statistics.fmean(values))
        assert figures.p99 == pytest.approx(float(np.percentile(values, 99)))


def test_only_completed_requests_count() -> None:
    run = run_of(
        outcome("a", 0.0, 1.0, 2.0, 11, prompt=100, cached=50),
        outcome("b", 0.0, 1.0, 4.0, 5, end="left"),
        outcome("c", 0.0, None, 0.0, 0, end="refused", worker=-1, reason="queue_full"),
        outcome("d", 0.0, 1.0, 3.0, 5, end="failed", reason="worker died"),
    )
    summary = summarize(run)
    assert (summary.requests, summary.completed, summary.left, summary.refused, summary.failed) == (4, 1, 1, 1, 1)
    assert summary.latencies["e2e"].count == 1 and summary.latencies["tpot"].mean == 0.1
    assert (summary.output_tokens, summary.output_tokens_per_s, summary.requests_per_s) == (11, 11 / 4, 1 / 4)
    assert (summary.hit_rate, summary.prompt_tokens_per_s) == (0.5, 25.0)
    assert summary.reasons == {"queue_full": 1, "worker died": 1}
    assert summary.cost.worker_seconds_per_million == 4.0 / 21 * 1e6


def test_distinct_reasons_are_capped() -> None:
    often = [outcome(f"often {i}", first=None, end="refused", reason="full") for i in range(3)]
    once = [outcome(f"once {i}", first=None, end="failed", reason="ab"[i % 2] * (i + 1)) for i in range(100)]
    reasons = summarize(run_of(*once, *often)).reasons
    assert next(iter(reasons.items())) == ("full", 3)
    assert (len(reasons), reasons["other reasons"]) == (21, 100 - 19)


def test_reasons_differing_in_a_number_are_merged() -> None:
    long = [
        outcome(f"{n}", first=None, end="refused", reason=f"{n:,} tokens are more than 8192.") for n in (9000, 9500)
    ]
    assert summarize(run_of(*long)).reasons == {"N tokens are more than N.": 2}


def test_run_without_requests_has_metrics() -> None:
    summary = summarize(run_of(), parse_slo("ttft_p99=1,tpot=1"), price_per_worker_hour=2.0)
    assert (summary.requests, summary.requests_per_s, summary.hit_rate, summary.kv_use) == (0, 0.0, None, None)
    assert summary.slo is not None and summary.slo.held and summary.slo.attainment is None
    assert summary.latencies == {} and summary.cost.price_per_million is None


def test_goodput_counts_requests_within_all_limits() -> None:
    run = run_of(
        outcome("good", 0.0, 0.5, 1.5, 11),
        outcome("one token has no time per token", 0.0, 0.5, 0.5, 1),
        outcome("late first token", 0.0, 0.6, 1.0, 11),
        outcome("slow tokens", 0.0, 0.5, 2.0, 11),
        outcome("left", 0.0, 0.1, 0.2, 2, end="left"),
    )
    slo = summarize(run, parse_slo("ttft=0.5,tpot=0.1,attainment=0.4")).slo
    assert slo is not None
    assert (slo.good, slo.attainment, slo.goodput, slo.held) == (2, 0.4, 1.0, True)
    stricter = summarize(run, parse_slo("ttft=0.5,tpot=0.1,attainment=0.41")).slo
    assert stricter is not None and not stricter.held


def test_rejected_requests_break_percentile_limits() -> None:
    quick = [outcome(str(i), 0.0, 0.1, 0.2) for i in range(98)]
    lost = [outcome(f"lost {i}", 0.0, None, 0.0, 0, end="refused", worker=-1) for i in range(2)]
    slo = parse_slo("ttft_p99=0.5,ttft_p90=0.5,tpot_mean=1")
    checks = summarize(run_of(*quick, *lost), slo).slo
    assert checks is not None and not checks.held
    assert [(check.name, check.value, check.held) for check in checks.checks] == [
        ("ttft_p99", None, False),
        ("ttft_p90", 0.1, True),
        ("tpot_mean", None, False),
    ]
    whole = summarize(run_of(*quick), slo).slo
    assert whole is not None and whole.held


def test_worker_occupancy_is_a_mean_over_time() -> None:
    samples = (
        WorkerSample(2.0, 1, 4, 1, 40, 0),
        WorkerSample(0.0, 0, 0, 2, 50, 0),
        WorkerSample(1.0, 0, 2, 6, 100, 0),  # for three seconds, to the last end
        WorkerSample(0.0, 1, 0, 1, 0, 0),
    )
    fields = {"workers": ("a", "b"), "blocks": (100, 80)}
    summary = summarize(run_of(outcome(ended=4.0), samples=samples, **fields))
    first, second = summary.workers
    assert (first.kv_use, first.kv_peak, first.running, first.waiting) == (0.875, 1.0, 5.0, 1.5)
    assert (second.kv_use, second.kv_peak, second.running, second.waiting) == (0.25, 0.5, 1.0, 2.0)
    assert (summary.kv_use, summary.kv_peak, summary.running, summary.waiting) == (0.5625, 1.0, 6.0, 3.5)
    assert (first.requests, first.output_tokens, second.requests) == (1, 11, 0)


def test_jains_index_ranges_from_one_nth_to_one() -> None:
    assert jain(np.array([3.0, 3.0, 3.0])) == pytest.approx(1.0)
    assert jain(np.array([0.0, 7.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert jain(np.array([1.0, 2.0])) == pytest.approx(9 / 10)
    assert jain(np.array([5.0])) is None and jain(np.zeros(3)) is None


def test_speed_fairness_ignores_tenant_demand() -> None:
    much = [outcome(f"m{i}", 0.0, 0.1, 1.0, 20, tenant="much") for i in range(30)]
    little = [outcome(f"l{i}", 0.0, 0.1, 1.0, 20, tenant="little") for i in range(3)]
    summary = summarize(run_of(*much, *little), parse_slo("e2e=1"))
    assert summary.fairness_speed == pytest.approx(1.0)
    assert summary.fairness_service == pytest.approx(33**2 / (2 * (30**2 + 3**2)))
    assert [(each.tenant, each.requests, each.attainment) for each in summary.tenants] == [
        ("much", 30, 1.0),
        ("little", 3, 1.0),
    ]
    starved = [outcome(f"l{i}", 0.0, 5.0, 10.0, 20, tenant="little") for i in range(3)]
    unfair = summarize(run_of(*much, *starved)).fairness_speed
    assert unfair is not None and unfair < 0.7


def test_cost_covers_all_workers_for_the_whole_run() -> None:
    run = run_of(outcome(ended=10.0, output=1000), workers=("a", "b"), blocks=(1, 1))
    cost = summarize(run, price_per_worker_hour=3.6, devices_per_worker=4).cost
    assert (cost.worker_seconds, cost.worker_seconds_per_million) == (20.0, 20_000.0)
    assert cost.device_hours_per_million == pytest.approx(20_000 * 4 / 3600)
    assert cost.price_per_million == pytest.approx(20.0)


def test_loading_worker_costs_and_stopped_worker_does_not() -> None:
    absences = (Absence(0, 2.0, 4.0, False), Absence(1, 6.0, 7.0, True), Absence(1, 9.0, 99.0, False))
    samples = (WorkerSample(0.0, 0, 0, 2, 50, 0), WorkerSample(2.0, 0, 0, 0, 0, 0), WorkerSample(4.0, 0, 0, 2, 50, 0))
    run = run_of(
        outcome(arrived=0.0, ended=10.0, output=100),
        workers=("a", "b"),
        blocks=(100, 100),
        absences=absences,
        samples=samples,
    )
    summary = summarize(run, price_per_worker_hour=3.6)
    cost = summary.cost
    assert (cost.worker_seconds, cost.away_seconds, cost.restarting_seconds) == (20 - 3, 3.0, 1.0)
    assert cost.price_per_million == pytest.approx(17 / 100 * 1e6 * 3.6 / 3600)
    assert [(each.away, each.restarting) for each in summary.workers] == [(2.0, 0.0), (1.0, 1.0)]
    assert summary.workers[0].kv_use == 0.5, "of the eight seconds for which it ran"
    bins = over_time(run)
    assert bins is not None
    assert np.mean(bins.row_absent, 1) == pytest.approx([0.2, 0.2])


def test_time_breakdown_adds_up_to_latencies() -> None:
    outcomes = [outcome(str(i), 0.0, 1.0, 2.0) for i in range(199)]
    outcomes += [outcome("late", 0.0, 5.0, 6.0), outcome("lost", 0.0, None, 7.0, 0, end="left")]
    quick = ({"computing": 0.75, "slot": 0.25}, {"computing": 1.0})
    late, lost = ({"computing": 1.0, "blocks": 4.0}, {"preempted": 1.0}), ({"slot": 7.0}, {})
    summary = summarize(run_of(*outcomes, waits=waits_of(*[quick] * 199, late, lost)))
    found = {each.reason: each for each in summary.waits}
    assert sum(each.before for each in summary.waits) == pytest.approx(summary.latencies["ttft"].mean)
    between = summary.latencies["e2e"].mean - summary.latencies["ttft"].mean
    assert sum(each.between for each in summary.waits) == pytest.approx(between)
    assert [(each.reason, each.lost) for each in summary.waits][:2] == [("slot", 7.0), ("computing", 0.0)]
    assert found["blocks"].before == pytest.approx(4 / 200)
    assert found["blocks"].before_slowest == pytest.approx(4 / 200), "the second one took as long as all others"
    assert found["preempted"].between_slowest == pytest.approx(1 / 200)
    assert summary.waiting_seconds == pytest.approx({"slot": 199 / 4 + 7, "blocks": 4.0, "preempted": 1.0})
    only_lost = summarize(run_of(outcomes[-1], waits=waits_of(lost)))
    assert [(each.reason, each.before, each.lost) for each in only_lost.waits] == [("slot", 0.0, 7.0)]


def test_metrics_do_not_depend_on_outcome_order() -> None:
    run = queued(300)
    backwards = np.frombuffer(run.waits, np.float32).reshape(300, -1)[::-1].tobytes()
    turned = msgspec.structs.replace(run, outcomes=run.outcomes[::-1], samples=run.samples[::-1], waits=backwards)
    slo = parse_slo("ttft_p99=0.5,tpot=0.05")
    there, back = (msgspec.to_builtins(summarize(each, slo)) for each in (run, turned))
    assert there.pop("tenants") and back.pop("tenants")
    assert [there.pop("fairness_speed")] == pytest.approx([back.pop("fairness_speed")])
    assert there == back


def test_latencies_are_sorted() -> None:
    run = queued(200)
    found, figures = latencies_of(run), summarize(run).latencies
    for name, values in found.items():
        assert np.all(np.diff(values) >= 0)
        assert (len(values), values[-1]) == (figures[name].count, figures[name].max)


@pytest.mark.timing
def test_many_outcomes_are_summarized_quickly() -> None:
    run = queued(2000)
    many = msgspec.structs.replace(run, outcomes=run.outcomes * 25, waits=run.waits * 25)
    began = time.perf_counter()
    assert summarize(many, parse_slo("ttft_p99=0.5")).requests == 50_000
    assert time.perf_counter() - began < 2.0 * slowdown()  # 0.15 s on an idle machine
