"""Several runs as one value: settings, rates and seeds, the figures of each, and the JSON for other tools.

A report holds figures and not the runs, so a sweep over many of them needs memory for one run at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from fd_core.errors import ConfigError
from fd_core.simulation.results import comparing
from fd_core.simulation.results.slo import Slo
from fd_core.simulation.results.summary import Numbers, Run, RunSummary, column, latencies_of, percentiles, summarize

SHARES: Final = (*map(float, range(1, 99)), 99.0, 99.5, 99.9, 99.99)
"""Percentiles that represent a distribution."""
_BINS: Final = 160
_MOST_ROWS: Final = 32


class TimeBins(msgspec.Struct, frozen=True, kw_only=True):
    """A run over time: `start` to `end` in equal bins; each number is a mean over its bin."""

    start: float
    end: float
    arrivals: tuple[float, ...]
    """Per second."""
    completions: tuple[float, ...]
    """Completed requests per second."""
    waiting: tuple[float, ...]
    """Total over all workers, as is `running`."""
    running: tuple[float, ...]
    kv_use: tuple[float, ...]
    """Share of KV blocks that requests hold, mean of the workers that serve."""
    rows: tuple[str, ...]
    """Workers, at most 32: beyond that each row is the mean of several consecutive ones."""
    row_waiting: tuple[tuple[float, ...], ...]
    row_running: tuple[tuple[float, ...], ...]
    row_kv_use: tuple[tuple[float, ...], ...]
    row_absent: tuple[tuple[float, ...], ...]
    """Share of the time without service: there was no process, or an engine was loading."""


def distributions(run: Run) -> dict[str, tuple[float, ...]]:
    """Return the percentiles at `SHARES` of each latency that completed requests have, seconds."""
    return {name: tuple(percentiles(values, SHARES)) for name, values in latencies_of(run).items() if len(values)}


def over_time(run: Run) -> TimeBins | None:
    """Return a run over time; None if nothing was sampled or no time passed."""
    arrived, ended = column(run.outcomes, "arrived"), column(run.outcomes, "ended")
    at, worker = column(run.samples, "at"), column(run.samples, "worker").astype(np.int64)
    if not len(at):
        return None
    start, end = min(at.min(), arrived.min(initial=at.min())), max(at.max(), ended.max(initial=0.0))
    if end <= start:
        return None
    edges = np.linspace(start, end, _BINS + 1)
    completed = np.fromiter((each.end in ("stop", "length") for each in run.outcomes), np.bool_, len(run.outcomes))
    blocks = np.maximum(np.array(run.blocks, np.float64), 1)
    order = np.lexsort((at, worker))
    bounds = np.searchsorted(worker[order], np.arange(len(run.workers) + 1))

    def of_worker(values: Numbers, index: int) -> Numbers:
        """Return the means of one worker: a sample holds until the next one."""
        own = order[bounds[index] : bounds[index + 1]]
        if not len(own):
            return np.zeros(_BINS)
        times = np.append(at[own], end)
        grown = np.concatenate(([0.0], np.cumsum(values[own] * np.diff(times))))
        means: Numbers = np.diff(np.interp(edges, times, grown)) / np.diff(edges)
        return means

    def table(values: Numbers) -> Numbers:
        return np.array([of_worker(values, index) for index in range(len(run.workers))])

    def a_second(times: Numbers) -> tuple[float, ...]:
        return _plain(np.histogram(times, edges)[0] / np.diff(edges))

    waiting, running = table(column(run.samples, "waiting")), table(column(run.samples, "running"))
    kv_use = table(column(run.samples, "used_blocks") / blocks[worker])
    absent = np.zeros((len(run.workers), _BINS))
    for each in run.absences:
        absent[each.worker] += np.diff(np.clip(edges, each.begin, each.end)) / np.diff(edges)
    groups = np.array_split(np.arange(len(run.workers)), min(len(run.workers), _MOST_ROWS))
    return TimeBins(
        start=float(start),
        end=float(end),
        arrivals=a_second(arrived),
        completions=a_second(ended[completed]),
        waiting=_plain(waiting.sum(0)),
        running=_plain(running.sum(0)),
        kv_use=_plain(kv_use.sum(0) / np.maximum(len(run.workers) - absent.sum(0), 1.0)),
        rows=tuple(
            run.workers[each[0]] if len(each) == 1 else f"{run.workers[each[0]]} to {run.workers[each[-1]]}"
            for each in groups
        ),
        row_waiting=tuple(_plain(waiting[each].mean(0)) for each in groups),
        row_running=tuple(_plain(running[each].mean(0)) for each in groups),
        row_kv_use=tuple(_plain(kv_use[each].mean(0)) for each in groups),
        row_absent=tuple(_plain(absent[each].mean(0)) for each in groups),
    )


def _plain(values: Numbers) -> tuple[float, ...]:
    return tuple(values.tolist())


REPORT_VERSION: Final = 1
"""Version of the JSON schema. Added fields keep it; removed or redefined ones raise it."""
LOAD: Final = "rate"
"""Axis of the request rate, per second."""

Values = dict[str, float | str]


class ReportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run that a report keeps."""

    setting: str
    """Compared setting: a policy, a kind of machine. Runs that differ only in seed or `values` share it."""
    values: Values
    """Position on each axis, such as `rate` and `max_num_seqs`; numbers are sorted."""
    summary: RunSummary
    curves: dict[str, tuple[float, ...]]
    """Percentiles at `shapes.SHARES` of each latency, seconds."""
    bins: TimeBins | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a table, a file or a page."""

    title: str
    runs: tuple[ReportedRun, ...]
    """One seed or several for each setting and its values."""
    slo: Slo | None = None
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Settings that all runs share: model, workload, limits; plain values."""
    command: str = ""
    """Command that reproduces the report."""
    by: str | None = None
    """Figure of `comparing.FIGURES` that decides; goodput or the mean of whole requests if None."""
    traces: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Name of each written trace, and its path or its page's, relative to this report."""


class ReportCase(msgspec.Struct, frozen=True):
    """Runs that differ in seed alone."""

    setting: str
    values: Values
    runs: tuple[ReportedRun, ...]

    @property
    def summaries(self) -> tuple[RunSummary, ...]:
        """Summary of each run."""
        return tuple(run.summary for run in self.runs)

    @property
    def name(self) -> str:
        """The setting and its values."""
        return ", ".join([self.setting, *(f"{name} {shown(value)}" for name, value in self.values.items())])

    @property
    def held(self) -> bool | None:
        """True if the SLO is met with every seed; None without one."""
        held = [summary.slo.held for summary in self.summaries if summary.slo]
        return all(held) if held else None

    def figure(self, name: str) -> comparing.SeedInterval | None:
        """Return a figure's mean over seeds; None if one of the runs does not have it."""
        found = [comparing.FIGURES[name].of(summary) for summary in self.summaries]
        there = [float(value) for value in found if value is not None]
        return comparing.interval(there) if there and len(there) == len(found) else None


class LoadPoint(msgspec.Struct, frozen=True):
    """Result of an arrival rate; means over seeds."""

    rate: float
    requests_per_s: comparing.SeedInterval | None
    """Completed requests per second."""
    ttft_p99: comparing.SeedInterval | None
    goodput: comparing.SeedInterval | None
    held: bool | None
    """True if the SLO is met with every seed; None without one."""


class LoadCurve(msgspec.Struct, frozen=True):
    """Figures of one setting as the load grows."""

    setting: str
    values: Values
    """Values on the other axes."""
    points: tuple[LoadPoint, ...]
    knee: float | None
    """The last rate before the bend, of the rates that were tried."""
    words: str
    """Explanation of the knee, or of its absence."""


def reported(
    run: Run,
    setting: str | None = None,
    values: Mapping[str, float | str] | None = None,
    *,
    slo: Slo | None = None,
    price_per_worker_hour: float | None = None,
    devices_per_worker: int = 1,
) -> ReportedRun:
    """Return the report's entry of a run; `setting` is the run's label by default."""
    return ReportedRun(
        setting=setting or run.label,
        values=dict(values or {}),
        summary=summarize(run, slo, price_per_worker_hour=price_per_worker_hour, devices_per_worker=devices_per_worker),
        curves=distributions(run),
        bins=over_time(run),
    )


def is_calculated(summary: RunSummary) -> bool:
    """Return True if the times of a run depend on no measured cost."""
    return "calculated" in summary.profile


def cases_of(report: Report) -> tuple[ReportCase, ...]:
    """Return the runs by setting and values, in the order of settings, then of values; seeds in their order.

    Raises `ConfigError` if a seed occurs twice, or if some runs lack an axis that others have.
    """
    settings = list(dict.fromkeys(run.setting for run in report.runs))
    axes = list(report.runs[0].values) if report.runs else []
    found: dict[tuple[Any, ...], list[ReportedRun]] = {}
    for run in report.runs:
        if list(run.values) != axes:
            raise ConfigError(f"a run has the axes {list(run.values)}, and the first one {axes}")
        place = (settings.index(run.setting), *(_order(value) for value in run.values.values()))
        found.setdefault(place, []).append(run)
    cases = []
    for _, runs in sorted(found.items()):
        seeds = [run.summary.seed for run in runs]
        if len(set(seeds)) < len(seeds):
            raise ConfigError(f"{ReportCase(runs[0].setting, runs[0].values, ()).name}: a seed occurs twice: {seeds}")
        in_order = sorted(runs, key=lambda run: run.summary.seed)
        cases.append(ReportCase(runs[0].setting, runs[0].values, tuple(in_order)))
    return tuple(cases)


def axes_of(cases: Sequence[ReportCase]) -> dict[str, list[float | str]]:
    """Return the axes with more than one value, with their values in order."""
    axes: dict[str, list[float | str]] = {}
    for name in cases[0].values if cases else ():
        values = sorted({case.values[name] for case in cases}, key=_order)
        if len(values) > 1:
            axes[name] = values
    return axes


def comparisons_of(report: Report, cases: Sequence[ReportCase]) -> list[tuple[Values, comparing.SettingsComparison]]:
    """Return the comparison of settings for each point on the axes that has several."""
    places: dict[tuple[Any, ...], list[ReportCase]] = {}
    for case in cases:
        places.setdefault(tuple(map(_order, case.values.values())), []).append(case)
    by = comparing.figure_named(report.by) if report.by else None
    return [
        (there[0].values, comparing.compare({case.setting: case.summaries for case in there}, by))
        for _, there in sorted(places.items())
        if len(there) > 1
    ]


def load_curves_of(cases: Sequence[ReportCase]) -> list[LoadCurve]:
    """Return a curve for each setting and point on the other axes, if there are several rates."""
    if LOAD not in axes_of(cases):
        return []
    lines: dict[tuple[Any, ...], list[ReportCase]] = {}
    for case in cases:
        others = {name: value for name, value in case.values.items() if name != LOAD}
        lines.setdefault((case.setting, *others.items()), []).append(case)
    curves = []
    for (setting, *place), there in lines.items():
        points = []
        for case in there:
            rate = case.values[LOAD]
            if isinstance(rate, str):
                raise ConfigError(f"expected a rate in requests per second, got {rate!r}")
            done, late, good = (case.figure(name) for name in ("requests_per_s", "ttft_p99", "goodput"))
            points.append(LoadPoint(rate, done, late, goodput=good, held=case.held))
        curves.append(LoadCurve(setting, dict(place), tuple(points), *_knee(points)))
    return curves


def report_document(report: Report) -> dict[str, Any]:
    """Return the report as a value that encodes to JSON, to the same bytes for the same runs.

    `cases` holds the figures of every run, as `summary.RunSummary` describes them, and the distributions of latencies
    at `shares`; `comparisons` and `load_curves` are those of the tables and the page.
    """
    cases = cases_of(report)
    return {
        "fdcore_simulation": REPORT_VERSION,
        "title": report.title,
        "command": report.command,
        "calculated": any(is_calculated(run.summary) for run in report.runs),
        "slo": str(report.slo) if report.slo else None,
        "settings": dict(report.settings),
        "shares": SHARES,
        "cases": [
            {
                "setting": case.setting,
                "values": case.values,
                "runs": [{"figures": run.summary, "curves": run.curves} for run in case.runs],
            }
            for case in cases
        ],
        "comparisons": [{"values": values, "comparison": each} for values, each in comparisons_of(report, cases)],
        "load_curves": load_curves_of(cases),
        "traces": dict(report.traces),
    }


def _order(value: float | str) -> tuple[float, str]:
    """Return a key that sorts numbers before texts."""
    return (math.inf, value) if isinstance(value, str) else (float(value), "")


def shown(value: float | str) -> str:
    """Return a value of an axis as text."""
    return value if isinstance(value, str) else f"{value:g}"


def _knee(points: Sequence[LoadPoint]) -> tuple[float | None, str]:
    """Return the knee and its explanation."""
    if points[0].held is not None:
        last = None
        for point in points:
            if not point.held:
                words = f"{point.rate:g}/s violates the SLO"
                return (None, f"none: {words}") if last is None else (last, f"the last rate that meets it; {words}")
            last = point.rate
        return None, f"beyond {points[-1].rate:g}/s: every rate meets the SLO"
    power = {
        point.rate: point.requests_per_s.mean / point.ttft_p99.mean
        for point in points
        if point.requests_per_s and point.ttft_p99 and point.ttft_p99.mean > 0
    }
    if not power:
        return None, "none: no rate has a p99 of TTFT"
    knee = max(power, key=power.__getitem__)
    if knee == points[-1].rate:
        return None, f"beyond {knee:g}/s: completed requests a second still grow faster than the p99 of TTFT"
    return knee, "most completed requests a second for the p99 of TTFT (Kleinrock's power)"
