"""Reports of several runs: order, saturation point, reproducible bytes, and tables."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from fd_core.errors import ConfigError
from fd_core.simulation.results.report import (
    SHARES,
    Report,
    ReportedRun,
    axes_of,
    cases_of,
    comparisons_of,
    load_curves_of,
    over_time,
    report_document,
    reported,
)
from fd_core.simulation.results.slo import Slo, parse_slo
from fd_core.simulation.results.summary import Run
from fd_core.simulation.results.tables import print_report
from tests.simulation.results.made_up import queued

SLO = parse_slo("ttft_p99=2,tpot_p99=0.1")


def made(
    *rates: float, seeds: int = 2, settings: tuple[str, ...] = ("plain", "slower"), slo: Slo | None = SLO
) -> list[ReportedRun]:
    slowness = {"plain": 1.0, "slower": 1.3}
    return [
        reported(queued(150, rate, seed=seed, slower=slowness[name], label=name), values={"rate": rate}, slo=slo)
        for name in settings
        for rate in rates
        for seed in range(seeds)
    ]


def report_of(runs: list[ReportedRun], slo: Slo | None = SLO) -> Report:
    return Report(title="Made up", runs=tuple(runs), slo=slo, settings={"model": "none"}, command="fdcore simulate")


def printed(report: Report, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_cases_are_ordered_by_setting_then_numerically() -> None:
    cases = cases_of(report_of(made(16.0, 2.0)[::-1]))
    assert [(case.setting, case.values["rate"]) for case in cases] == [
        ("slower", 2.0),
        ("slower", 16.0),
        ("plain", 2.0),
        ("plain", 16.0),
    ]
    assert [summary.seed for summary in cases[0].summaries] == [0, 1]
    assert axes_of(cases) == {"rate": [2.0, 16.0]}
    assert [values["rate"] for values, _ in comparisons_of(report_of([]), cases)] == [2.0, 16.0]


def test_duplicate_seed_and_missing_axis_are_rejected() -> None:
    runs = made(2.0, seeds=1)
    with pytest.raises(ConfigError, match=r"plain, rate 2: a seed occurs twice: \[0, 0\]"):
        cases_of(report_of(runs + runs[:1]))
    with pytest.raises(ConfigError, match="axes"):
        cases_of(report_of([*runs, msgspec.structs.replace(runs[0], values={})]))


def test_knee_is_the_last_rate_within_slo() -> None:
    plain, slower = load_curves_of(cases_of(report_of(made(4.0, 8.0, 16.0, 32.0))))
    assert plain.knee is not None and slower.knee is not None and slower.knee < plain.knee
    held = [point.rate for point in plain.points if point.held]
    assert plain.knee == max(held) and "violates the SLO" in plain.words
    hopeless = parse_slo("ttft_p99=0.0001")
    (curve,) = load_curves_of(cases_of(report_of(made(4.0, 8.0, settings=("plain",), slo=hopeless))))
    assert (curve.knee, curve.words) == (None, "none: 4/s violates the SLO")


def test_knee_without_slo_is_the_bend_of_the_curve() -> None:
    cases = cases_of(report_of(made(2.0, 8.0, 16.0, 32.0, 64.0, settings=("plain",), slo=None), None))
    (curve,) = load_curves_of(cases)
    late = {point.rate: point.ttft_p99.mean for point in curve.points if point.ttft_p99}
    assert curve.knee == 16.0  # two workers serve about 18 prompts per second
    assert late[32.0] > 2 * late[curve.knee] > late[2.0]
    (few,) = load_curves_of(cases[:2])
    assert few.knee is None and few.words.startswith("beyond 8/s")


def test_equal_runs_give_equal_bytes_regardless_of_duration() -> None:
    quick, slow = (msgspec.structs.replace(queued(50), wall_seconds=seconds) for seconds in (0.1, 9.0))
    quick_document, slow_document = (report_document(report_of([reported(run)])) for run in (quick, slow))
    assert msgspec.json.encode(quick_document) == msgspec.json.encode(slow_document)


def test_json_has_version_and_all_metrics() -> None:
    document = json.loads(msgspec.json.encode(report_document(report_of(made(4.0)))))
    assert list(document)[:4] == ["fdcore_simulation", "title", "command", "calculated"]
    assert (document["fdcore_simulation"], document["calculated"]) == (1, True)
    run = document["cases"][0]["runs"][0]
    assert run["figures"]["latencies"]["ttft"]["count"] == 150
    assert len(run["curves"]["ttft"]) == len(document["shares"]) == len(SHARES)
    assert run["curves"]["ttft"][SHARES.index(99.0)] == run["figures"]["latencies"]["ttft"]["p99"]
    assert document["comparisons"][0]["comparison"]["by"] == "goodput"


def test_json_document_describes_every_field() -> None:
    text = (Path(__file__).parents[3] / "docs" / "study" / "simulation-results.md").read_text()
    document = json.loads(msgspec.json.encode(report_document(report_of(made(4.0, 16.0, seeds=1)))))
    named = set(re.findall(r"`([a-z_]+)(?:\[\])?`", text))
    inner = document["comparisons"][0]["comparison"], document["load_curves"][0], document["cases"][0]
    known_elsewhere = {"settings"}  # in a comparison: same as in the cases
    for part in (document, *inner):
        assert set(part) - known_elsewhere <= named


def test_means_over_time_match_the_summary() -> None:
    run = queued(200, workers=3)
    bins, summary = over_time(run), reported(run).summary
    assert bins is not None
    assert np.mean(bins.running) == pytest.approx(summary.running)
    assert np.mean(bins.waiting) == pytest.approx(summary.waiting)
    assert np.mean(bins.kv_use) == pytest.approx(summary.kv_use)
    width = (bins.end - bins.start) / len(bins.arrivals)
    assert sum(bins.arrivals) * width == pytest.approx(200) == sum(bins.completions) * width
    assert bins.rows == run.workers and np.sum(bins.row_running, 0) == pytest.approx(bins.running)


def test_many_workers_are_grouped_into_rows() -> None:
    run: Run = queued(120, 50.0, workers=100)
    bins = over_time(run)
    assert bins is not None and len(bins.rows) == len(bins.row_kv_use) == 32
    assert bins.rows[0] == "mixed-0 to mixed-3"
    assert over_time(msgspec.structs.replace(run, samples=())) is None


def test_single_case_table_warns_of_calculated_costs() -> None:
    text = printed(report_of(made(4.0, seeds=1, settings=("plain",))))
    assert text.startswith("CALCULATED, NEVER MEASURED: the times of steps are based on made up")
    for words in ("150 of 150", "TTFT", "a slot", "holds ttft_p99", "Jain", "Good requests per second"):
        assert words in text
    measured = msgspec.structs.replace(queued(50), profile="measured on a machine")
    assert "CALCULATED" not in printed(report_of([reported(measured)]))


def test_tables_show_seeds_rates_and_winner() -> None:
    seeds = printed(report_of(made(4.0, settings=("plain",))))
    assert "plain, rate 4: 2 seeds" in seeds and "holds ttft_p99: held with 2 of 2 seeds" in seeds
    assert "Not completed" not in seeds
    text = printed(report_of(made(4.0, 16.0, seeds=3)))
    assert "slower, rate 16" in text and "Knee of plain" in text
    assert "Against plain, rate 4" in text and "worse" in text
    assert "plain wins by Goodput" in text
    narrow = printed(report_of(made(4.0, 16.0)), 80)
    assert "│ slower, rate 16 " in narrow and "TPOT p99" not in narrow.split("Knee")[0]


def test_run_without_completions_is_printed() -> None:
    run = queued(3)
    nothing = msgspec.structs.replace(
        run, outcomes=tuple(msgspec.structs.replace(each, end="refused", reason="full") for each in run.outcomes)
    )
    text = printed(report_of([reported(nothing, slo=SLO)]))
    assert "0 of 3" in text and "Requests refused" in text and "BREAKS ttft_p99: never, limit 2.00 s" in text
    assert "No request was completed: there are no latencies." in text
    assert "Not completed" in printed(report_of([reported(nothing, "drops"), reported(run, "serves")], None))
