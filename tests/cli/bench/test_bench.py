import json
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.cli.bench.results import RequestTimes, objectives, report
from fd_core.cli.bench.router import RouterTraffic
from fd_core.cli.bench.scheduler import StepTimes, prompts
from fd_core.cli.bench.workload import arrivals, from_file, synthetic, synthetic_ids
from fd_core.errors import ConfigError
from fd_core.plugins import ROUTER_POLICY, Plugins
from fd_core.router.config import RouterConfig
from fd_core.router.router import Router
from tests.server.fakes import FakeClient, live

runner = CliRunner()


def bench_serve(server, tmp_path, *flags):
    path = tmp_path / "figures.json"
    result = runner.invoke(app, ["bench", "serve", "--url", server.url, "--json", str(path), *flags])
    return result, json.loads(path.read_text())


def test_serve_counts_tokens_sent_by_the_server(tmp_path):
    with live(lambda: FakeClient("x" * 50)) as server:
        flags = ["--num-prompts", "6", "--input-len", "20", "--output-len", "10", "--max-concurrency", "2"]
        result, figures = bench_serve(server, tmp_path, *flags, "--goodput", "ttft:60000", "--goodput", "tpot:0.000001")
        prompts = sum(len(spec.prompt) for spec in server.client.specs)
        assert all(spec.params.ignore_eos and spec.params.temperature == 0 for spec in server.client.specs)
    assert result.exit_code == 0, result.output
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert (figures["output_tokens"], figures["prompt_tokens"]) == (60, prompts)
    assert figures["goodput_requests_per_s"] == 0
    assert set(figures["latency_ms"]) == {"TTFT", "TPOT", "ITL", "E2E"}
    assert set(figures["latency_ms"]["TTFT"]) == {"mean", "p50", "p90", "p99"}
    assert "Output tokens per second" in result.stdout


def test_serve_exits_nonzero_if_every_request_failed(tmp_path):
    with live() as server:
        result, figures = bench_serve(server, tmp_path, "--num-prompts", "3", "--input-len", "3000")
    assert result.exit_code == 1
    assert (figures["completed"], figures["failed"]) == (0, 3)
    assert sum(figures["errors"].values()) == 3
    assert "no request was completed" in result.stderr


def test_serve_replays_a_dataset(tmp_path):
    rows = [{"prompt": "abc", "max_tokens": 3}, {"messages": [{"role": "user", "content": "hi"}]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with live(lambda: FakeClient("x" * 50)) as server:
        _, figures = bench_serve(server, tmp_path, "--dataset", str(path), "--output-len", "5")
        prompts_sent = sorted(bytes(spec.prompt).decode() for spec in server.client.specs)
    assert prompts_sent == ["abc", "user: hi\nassistant: "]
    assert figures["output_tokens"] == 8


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "contains no requests"),
        ("{", "line 1: not JSON"),
        ('{"prompt": "a"}\n[]', "line 2: expected `prompt` or `messages`"),
        ('{"prompt": 3}', "line 1: expected `prompt` or"),
        ('{"prompt": "a", "max_tokens": "many"}', "line 1: max_tokens is 'many'; expected a number above 0"),
    ],
)
def test_bad_dataset_names_the_line(tmp_path, text, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        from_file(path, None, 8)


def test_missing_dataset_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        from_file(tmp_path / "nowhere", None, 8)


def test_offline_benchmarks_measure_the_engine(tmp_path):
    """The null backend scripts its tokens: only the counts can be checked."""
    path = tmp_path / "figures.json"
    shape = ["--backend", "null", "--input-len", "16", "--output-len", "8", "--json", str(path)]
    result = runner.invoke(app, ["bench", "latency", "scripted", "--runs", "3", *shape])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert (figures["completed"], figures["prompt_tokens"], figures["output_tokens"]) == (3, 48, 24)
    result = runner.invoke(app, ["bench", "throughput", "scripted", "--num-prompts", "5", *shape])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert (figures["completed"], figures["output_tokens"]) == (5, 40)
    assert figures["settings"]["backend"] == "null"


def test_scheduler_measures_every_case(tmp_path):
    path = tmp_path / "figures.json"
    flags = ["--running", "3", "--running", "8", "--drafts", "0", "--drafts", "2", "--steps", "6", "--block-size", "4"]
    result = runner.invoke(app, ["bench", "scheduler", *flags, "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    cases = [(case["running"], case["drafts"], case["steps"]) for case in figures["cases"]]
    assert cases == [(3, 0, 6), (8, 0, 6), (3, 2, 6), (8, 2, 6)]
    for case in figures["cases"]:
        assert list(case["us"]) == ["plan", "commit", "step"]
        assert all(0 < row["median"] <= row["p99"] for row in case["us"].values())
    assert "commit" in result.stdout


def test_scheduler_rejects_an_unwritable_result_file(tmp_path):
    result = runner.invoke(app, ["bench", "scheduler", "--json", str(tmp_path / "nowhere" / "figures.json")])
    assert result.exit_code == 2
    assert "cannot write" in result.stderr


def test_router_measures_every_number_of_requests_in_flight(tmp_path):
    path = tmp_path / "figures.json"
    flags = ["--in-flight", "3", "--in-flight", "20", "--shared-tokens", "128", "--workers", "2", "--requests", "5"]
    result = runner.invoke(app, ["bench", "router", *flags, "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert [(case["in_flight"], case["requests"]) for case in figures["cases"]] == [(3, 5), (20, 5)]
    for case in figures["cases"]:
        assert list(case["us"]) == ["select", "release", "both"]
        assert all(0 < row["median"] <= row["p99"] for row in case["us"].values())
    assert figures["settings"]["policy"] == "cache_aware" and "release" in result.stdout


@pytest.mark.parametrize(
    "flags, exit_code, words",
    [
        (["--in-flight", "0"], 2, "--in-flight"),
        (["--workers", "many"], 2, "--workers"),
        (["--policy", "best"], 4, "unknown router policy 'best'"),
        (["--json", "nowhere/figures.json"], 2, "cannot write"),
    ],
)
def test_router_rejects_invalid_arguments(flags, exit_code, words):
    result = runner.invoke(app, ["bench", "router", *flags])
    assert result.exit_code == exit_code
    assert words in result.stderr


def test_router_traffic_keeps_its_requests_in_flight():
    router = Router(RouterConfig(policy="cache_aware"), partial(Plugins.discover([]).load, ROUTER_POLICY))
    traffic = RouterTraffic(router, workers=3, in_flight=12, shared_tokens=256, seed=1)
    traffic.measure(7)
    state = router.snapshot()
    assert state.total.requests == 12 and state.faults == 0
    assert state.tally.hit_blocks > 0 and all(one.load.requests for one in state.workers)


def test_scheduler_compares_with_empty_queue_and_times_a_burst(tmp_path):
    path = tmp_path / "figures.json"
    flags = ["--running", "3", "--waiting", "5", "--waiting-tokens", "400", "--steps", "12", "--block-size", "4"]
    result = runner.invoke(app, ["bench", "scheduler", *flags, "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    [case] = figures["cases"]
    assert [case[name] for name in ("running", "drafts", "steps", "waiting", "waiting_tokens")] == [3, 0, 12, 5, 400]
    plans = case["plan_us"]
    assert case["ratio"] == pytest.approx(plans["waiting"]["median"] / plans["empty"]["median"])
    burst = figures["burst"]
    assert (burst["prompts"], burst["prompt_tokens"]) == (5, 400)
    assert 0 < burst["plan_us"]["median"] <= burst["worst_plan_us"]
    assert "5 x 400 tokens" in result.stdout and "add a request" in result.stdout


def test_scheduler_rejects_waiting_prompts_that_would_fit():
    flags = ["--running", "3", "--waiting", "1", "--waiting-tokens", "40", "--steps", "12", "--block-size", "4"]
    result = runner.invoke(app, ["bench", "scheduler", *flags])
    assert result.exit_code == 2
    assert "--waiting-tokens: a prompt of 40 tokens may fit with 3 requests" in result.stderr


def test_step_time_is_plan_plus_commit():
    times = StepTimes((1e-6,), (3e-6,)) + StepTimes((3e-6,), (5e-6,))
    figures = times.figures(running=4, drafts=0)
    assert {part: round(row["median"], 6) for part, row in figures["us"].items()} == {"plan": 2, "commit": 4, "step": 6}
    assert figures["per_request_us"] == pytest.approx(1.5)


def test_prompts_end_at_every_offset_in_a_block():
    drawn = prompts(16, 8, 0)
    assert sorted(len(ids) % 8 for ids in drawn) == sorted([*range(8)] * 2)
    assert len({tuple(ids[:4]) for ids in drawn}) == 16


def test_workloads_repeat_and_share_no_prefix():
    first, again, other = synthetic(8, 50, 4, 1), synthetic(8, 50, 4, 1), synthetic(8, 50, 4, 2)
    assert first == again != other
    assert len({ask.prompt.split()[0] for ask in first}) == 8
    ids = synthetic_ids(4, 33, 1000, 1)
    assert ids == synthetic_ids(4, 33, 1000, 1)
    assert {len(prompt) for prompt in ids} == {33}
    assert min(map(min, ids)) >= 500
    assert max(map(max, ids)) < 1000


def test_arrivals_follow_the_rate():
    assert arrivals(3, None, 0) == [0.0, 0.0, 0.0]
    times = arrivals(2000, 10.0, 0)
    assert times == sorted(times)
    assert 150 < times[-1] < 250


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:inf", "itl:3", ":3"])
def test_bad_objectives(text):
    with pytest.raises(ConfigError, match="--goodput"):
        objectives([text])


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.integers(0, 100))
def test_figures_of_a_request(gaps, tokens):
    arrivals = tuple(np.cumsum(gaps).tolist())
    timeline = RequestTimes(sent=0.0, arrivals=arrivals, ended=arrivals[-1], output_tokens=tokens)
    assert timeline.ttft == arrivals[0]
    assert math.isnan(timeline.tpot) == (tokens < 2)
    assert len(timeline.gaps) == len(gaps) - 1
    if tokens >= 2:
        assert timeline.ttft + timeline.tpot * (tokens - 1) == pytest.approx(timeline.e2e)


def test_failed_request_is_never_good_and_counts_nothing():
    timelines = [RequestTimes(0.0, (0.1, 0.2), 0.2, 5, 2), RequestTimes(0.0, (0.1,), 0.2, 5, 1, error="broken")]
    figures = report(timelines, 2.0, objectives(["ttft:1000"]))
    assert (figures.completed, figures.failed, figures.good, figures.output_tokens) == (1, 1, 1, 2)
    assert figures.rates()["output_tokens_per_s"] == 1.0
    assert figures.errors == {"broken": 1}
