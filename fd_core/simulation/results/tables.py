"""Runs as tables of a terminal: the figures of one case, a comparison of cases, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fd_core.simulation.clock.waits import WAIT_TITLES
from fd_core.simulation.results.comparing import (
    FIGURES,
    USUAL_FIGURES,
    ComparedFigure,
    SeedInterval,
    SettingsComparison,
)
from fd_core.simulation.results.report import (
    Report,
    ReportCase,
    cases_of,
    comparisons_of,
    is_calculated,
    load_curves_of,
    shown,
)
from fd_core.simulation.results.summary import RunSummary

_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "gap": "Longest gap", "e2e": "End to end"}
_NOTHING: Final = 5e-7
"""Seconds below which a wait counts as zero: the residue of sums of rounded numbers."""
_STYLES = {"better": "green", "worse": "red", "noise": "dim", "one seed": "yellow", "different": ""}


def print_report(report: Report, console: Console) -> None:
    """Print one case in full, several as one table, then comparisons of settings and the knees of load curves."""
    cases = cases_of(report)
    for profile in dict.fromkeys(run.summary.profile for run in report.runs if is_calculated(run.summary)):
        console.print(Text(f"CALCULATED, NEVER MEASURED: the times of steps are based on {profile}", "bold yellow"))
    if len(cases) == 1:
        _print_case(cases[0], console)
        return
    table = Table(title=report.title, title_justify="left")
    table.add_column("", min_width=min(24, max(len(case.name) for case in cases)), overflow="fold")
    names = [name for name in USUAL_FIGURES[:9] if _is_shown(FIGURES[name], [case.figure(name) for case in cases])]
    # Truncated names do not distinguish cases: a narrow terminal gets fewer figures.
    names = names[: max(3, (console.width - 28) // 14)]
    for name in names:
        table.add_column(FIGURES[name].title, justify="right")
    for case in cases:
        found = {name: case.figure(name) for name in names}
        cells = (figure_text(FIGURES[name], each.mean if each else None) for name, each in found.items())
        table.add_row(Text(case.name), *cells)
    console.print(table)
    for curve in load_curves_of(cases):
        about = ", ".join([curve.setting, *(f"{name} {shown(value)}" for name, value in curve.values.items())])
        knee = "" if curve.knee is None else f"{curve.knee:g}/s, "
        console.print(Text(f"Knee of {about}: {knee}{curve.words}"))
    for values, comparison in comparisons_of(report, cases):
        _print_comparison(values, comparison, console)


def duration_text(seconds: float | None) -> str:
    """Return seconds in a suitable unit."""
    if seconds is None:
        return "never"
    size = abs(seconds)
    if 0 < size < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if 0 < size < 1:
        return f"{seconds * 1e3:.{2 if size < 0.01 else 1 if size < 0.1 else 0}f} ms"
    return f"{seconds:,.2f} s" if size < 100 else f"{seconds:,.0f} s"


def figure_text(figure: ComparedFigure, value: float | None) -> str:
    """Return a figure's value with its unit."""
    if value is None:
        return "–"
    if figure.unit == "s":
        return duration_text(value)
    if figure.unit == "share":
        return _share(value)
    return _number(value) + figure.unit


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _print_case(case: ReportCase, console: Console) -> None:
    if len(case.runs) == 1:
        _print_summary(case.runs[0].summary, console)
        return
    table = Table(title=f"{case.name}: {len(case.runs)} seeds", title_justify="left")
    for name in ("", "mean", "95 % interval"):
        table.add_column(name, justify="right" if name else "left")
    for name, figure in FIGURES.items():
        if (found := case.figure(name)) is not None and (found.mean or not figure.rare):
            table.add_row(figure.title, figure_text(figure, found.mean), _span(figure, found))
    console.print(table)
    checks = [run.summary.slo.checks for run in case.runs if run.summary.slo]
    for of_seeds in zip(*checks, strict=True):
        held, seeds = sum(check.held for check in of_seeds), len(of_seeds)
        line = f"{'holds' if held == seeds else 'BREAKS'} {of_seeds[0].name}: held with {held} of {seeds} seeds"
        console.print(Text(line, "green" if held == seeds else "bold red"))


def _print_summary(summary: RunSummary, console: Console) -> None:
    table = Table(title=f"{summary.label}, seed {summary.seed}", title_justify="left", show_header=False)
    table.add_row("Requests completed", f"{summary.completed:,} of {summary.requests:,}")
    for words in ("left", "refused", "failed"):
        if count := getattr(summary, words):
            table.add_row(f"Requests {words}", Text(f"{count:,}", "red"))
    for reason, count in summary.reasons.items():
        table.add_row(Text(f"  {reason}"), f"{count:,}")
    if summary.retried:
        table.add_row("Tried by several workers", f"{summary.retried:,}")
    table.add_row("Simulated time", duration_text(summary.seconds))
    table.add_row("Requests per second", _number(summary.requests_per_s))
    table.add_row("Prompt tokens per second", _number(summary.prompt_tokens_per_s))
    table.add_row("Output tokens per second", _number(summary.output_tokens_per_s))
    if (slo := summary.slo) is not None:
        table.add_row("Good requests per second", f"{_number(slo.goodput)}, {_share(slo.attainment)} of requests")
    for title, share in (("Prompt found in prefix caches", summary.hit_rate), ("KV blocks in use", summary.kv_use)):
        if share is not None:
            table.add_row(title, f"{share:.1%}")
    table.add_row("Running, waiting", f"{_number(summary.running)}, {_number(summary.waiting)}")
    table.add_row("Preemptions", f"{summary.preemptions:,}")
    if summary.fairness_speed is not None and summary.fairness_service is not None:
        fair = f"speed {summary.fairness_speed:.3f}, service {summary.fairness_service:.3f}"
        table.add_row("Fairness between tenants (Jain)", fair)
    cost = summary.cost
    for title, seconds in (("away", cost.away_seconds), ("that reloaded engines", cost.restarting_seconds)):
        if seconds:
            table.add_row(f"Worker-seconds {title}", Text(duration_text(seconds), "red"))
    if cost.worker_seconds_per_million is not None:
        table.add_row("Worker-seconds for 1M tokens", _number(cost.worker_seconds_per_million))
        table.add_row("Device-hours for 1M tokens", _number(cost.device_hours_per_million or 0.0))
    if cost.price_per_million is not None:
        table.add_row("Price of 1M tokens", _number(cost.price_per_million))
    table.add_row("Costs of steps", Text(summary.profile))
    console.print(table)
    latency = Table(title="Latency of completed requests", title_justify="left")
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    for name in ("", *columns):
        latency.add_column(name, justify="right" if name else "left")
    for name, figures in summary.latencies.items():
        latency.add_row(_TITLES[name], *(duration_text(getattr(figures, each)) for each in columns))
    console.print(latency if summary.latencies else Text("No request was completed: there are no latencies."))
    if summary.waits:
        waits = Table(title="Mean time of a request by wait reason", title_justify="left")
        columns = ("", "to first token", "slowest 1 %", "between tokens", "slowest 1 %", "not completed")
        for name in columns if summary.requests > summary.completed else columns[:-1]:
            waits.add_column(name, justify="right" if name else "left")
        for each in summary.waits:
            spent = (each.before, each.before_slowest, each.between, each.between_slowest, each.lost)
            cells = (duration_text(value) if value >= _NOTHING else "–" for value in spent[: len(waits.columns) - 1])
            waits.add_row(WAIT_TITLES[each.reason], *cells)
        console.print(waits)
    for check in slo.checks if slo else ():
        show = _share if check.name == "attainment" else duration_text
        line = f"{'holds' if check.held else 'BREAKS'} {check.name}: {show(check.value)}, limit {show(check.limit)}"
        console.print(Text(line, "green" if check.held else "bold red"))


def _print_comparison(values: dict[str, float | str], comparison: SettingsComparison, console: Console) -> None:
    first, *others = comparison.settings
    where = ", ".join(f"{name} {shown(value)}" for name, value in values.items())
    table = Table(title=f"Against {first}{', ' if where else ''}{where}", title_justify="left")
    for name in ("", first, *others):
        table.add_column(Text(name), justify="right" if name else "left")
    differences = {(each.setting, each.figure): each for each in comparison.differences}
    decided = {each.figure for each in comparison.differences if each.verdict in ("better", "worse")}
    for name in [name for name, each in FIGURES.items() if name in USUAL_FIGURES or (each.rare and name in decided)]:
        figure, base = FIGURES[name], comparison.figures[first].get(name)
        if base is None or not _is_shown(figure, [comparison.figures[each].get(name) for each in comparison.settings]):
            continue
        row = [Text(figure_text(figure, base.mean))]
        for setting in others:
            if (difference := differences.get((setting, name))) is None:
                row.append(Text("–"))
                continue
            cell = Text(f"{figure_text(figure, comparison.figures[setting][name].mean)} ")
            words, style = "equal", "dim"
            if not difference.more.low == difference.more.high == 0:
                more, style = figure_text(figure, difference.more.mean), _STYLES[difference.verdict]
                sign = "" if more.startswith("-") else "+"
                words = f"{difference.verdict}\n{sign}{more} {_span(figure, difference.more)}"
            row.append(cell.append(words, style))
        table.add_row(figure.title, *row, end_section=True)
    console.print(table)
    console.print(Text(comparison.words, "bold green" if comparison.wins else "bold yellow"))


def _is_shown(figure: ComparedFigure, found: Sequence[SeedInterval | None]) -> bool:
    return any(each is not None and (each.mean or not figure.rare) for each in found)


def _span(figure: ComparedFigure, found: SeedInterval) -> str:
    if found.low is None or found.high is None:
        return "one seed"
    return f"[{figure_text(figure, found.low)}, {figure_text(figure, found.high)}]"
