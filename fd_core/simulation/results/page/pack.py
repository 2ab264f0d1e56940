"""Packs a report into one self-contained HTML page, whose size grows neither with requests nor with workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from fd_core.config.outputs import write_whole
from fd_core.errors import ConfigError
from fd_core.http.pages.assembling import assemble
from fd_core.simulation.clock.waits import WAIT_TITLES
from fd_core.simulation.results.comparing import FIGURES, USUAL_FIGURES, VERDICTS, SeedInterval, SettingsComparison
from fd_core.simulation.results.report import (
    LOAD,
    SHARES,
    Report,
    ReportCase,
    axes_of,
    cases_of,
    comparisons_of,
    is_calculated,
    load_curves_of,
)
from fd_core.simulation.results.slo import MEASURES
from fd_core.simulation.results.summary import RunSummary

_MOST_CASES: Final = 1000
_MOST_WORKERS: Final = 64


def write_page(path: Path, report: Report) -> None:
    """Write the page. Raises `ConfigError` if it cannot be written or the report has too many cases to display."""
    write_whole(path, page_of(report).encode(), "--page")


def page_of(report: Report) -> str:
    """Return the page as HTML text; raises `ConfigError` as `write_page` does."""
    # User-supplied names must not end the element that carries them.
    facts = msgspec.json.encode(facts_of(report)).decode().replace("<", "\\u003c")
    own = ("page.css", "plots.js", "view.js")
    return assemble(__package__, "fd_core simulation", own=own, values={"facts": facts})


def facts_of(report: Report) -> dict[str, Any]:
    """Return the data of the page's scripts: plain values, numbers with four digits."""
    cases = cases_of(report)
    if len(cases) > _MOST_CASES:
        what = f"{len(cases):,} cases exceed the limit of a page ({_MOST_CASES:,})"
        raise ConfigError(what, field="--page", hint="write JSON, or try fewer values")
    summaries = [run.summary for run in report.runs]
    settings = list(dict.fromkeys(case.setting for case in cases))
    figures = [
        figure
        for figure in FIGURES.values()
        if any(value is not None and (value or not figure.rare) for value in map(figure.of, summaries))
    ]
    names = [each.name for each in figures]
    curves, bins = _fitting(map(_curves, cases), 300_000), _fitting(map(_bins, cases), 500_000)
    return {
        "title": report.title,
        "command": report.command,
        "calculated": list(dict.fromkeys(each.profile for each in summaries if is_calculated(each))),
        "profiles": list(dict.fromkeys(each.profile for each in summaries)),
        "seeds": sorted({each.seed for each in summaries}),
        "slo": str(report.slo) if report.slo else None,
        "limits": {each.name: each.limit for each in report.slo.objectives} if report.slo else {},
        "about": [[name, _text(value)] for name, value in _flat("", report.settings)],
        "traces": dict(report.traces),
        "measures": {name: about[0].upper() + about[1:] for name, about in MEASURES.items()},
        "waits": WAIT_TITLES,
        "usual": USUAL_FIGURES,
        "figures": [[each.name, each.title, each.unit, each.more_is_better] for each in figures],
        "names": list(cases[0].values) if cases else [],
        "verdicts": VERDICTS,
        "shares": SHARES,
        "axes": axes_of(cases),
        "load": LOAD,
        "settings": settings,
        "cases": [
            {
                "setting": settings.index(case.setting),
                "at": list(case.values.values()),
                "figures": [each and _span(each) for each in map(case.figure, names)],
                "held": case.held,
                "curves": curves.get(index),
                "bins": bins.get(index),
                **(_details(case.runs[0].summary) if index in bins else {}),
            }
            for index, case in enumerate(cases)
        ],
        "loadCurves": [
            [settings.index(curve.setting), curve.values, curve.knee, curve.words] for curve in load_curves_of(cases)
        ],
        "comparisons": [_comparison(values, each, settings, names) for values, each in comparisons_of(report, cases)],
    }


def _short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _shorts(values: Iterable[float], digits: int = 4) -> list[float]:
    return [_short(value, digits) for value in values]


def _span(found: SeedInterval) -> list[float]:
    """Return the mean, followed by the interval if there is one."""
    return _shorts(each for each in (found.mean, found.low, found.high) if each is not None)


def _fitting(parts: Iterable[Any], most: int) -> dict[int, Any]:
    """Return the parts by index, as far as their JSON fits into `most` bytes; None parts are omitted."""
    kept: dict[int, Any] = {}
    for index, part in enumerate(parts):
        if part is None:
            continue
        most -= len(msgspec.json.encode(part))
        if most < 0:
            break
        kept[index] = part
    return kept


def _curves(case: ReportCase) -> dict[str, list[float]]:
    """Return the means over seeds of each percentile."""
    found = [run.curves for run in case.runs]
    names = [name for name in MEASURES if all(name in each for each in found)]
    return {
        name: _shorts(sum(column) / len(found) for column in zip(*(each[name] for each in found), strict=True))
        for name in names
    }


def _bins(case: ReportCase) -> dict[str, Any] | None:
    """Return the time bins of the first of a case's runs."""
    bins = case.runs[0].bins
    if bins is None:
        return None
    lines = ("arrivals", "completions", "waiting", "running", "kv_use")
    return {
        "seed": case.runs[0].summary.seed,
        "start": _short(bins.start, 6),
        "end": _short(bins.end, 6),
        **{name: _shorts(getattr(bins, name)) for name in lines},
        "rows": bins.rows,
        "absent": [_shorts(row, 3) if any(row) else [] for row in bins.row_absent],
        "strips": {
            name: [_shorts(row, 3) for row in getattr(bins, f"row_{name}")] for name in ("running", "waiting", "kv_use")
        },
    }


def _details(summary: RunSummary) -> dict[str, Any]:
    lost = {name: getattr(summary, name) for name in ("left", "refused", "failed")}
    return {
        "lost": {name: count for name, count in lost.items() if count},
        "reasons": summary.reasons,
        "waits": [[each.reason, *_shorts(msgspec.structs.astuple(each)[1:])] for each in summary.waits],
        "checks": [msgspec.structs.astuple(check) for check in summary.slo.checks] if summary.slo else [],
        "tenants": [msgspec.structs.astuple(each) for each in summary.tenants],
        "workers": [msgspec.structs.astuple(each) for each in summary.workers[:_MOST_WORKERS]],
        "moreWorkers": max(len(summary.workers) - _MOST_WORKERS, 0),
    }


def _comparison(
    values: Mapping[str, Any], found: SettingsComparison, settings: list[str], names: list[str]
) -> dict[str, Any]:
    differences = [
        [names.index(each.figure), settings.index(each.setting), _span(each.more), VERDICTS.index(each.verdict)]
        for each in found.differences
        if each.figure in names
    ]
    return {
        "at": list(values.values()),
        "base": settings.index(found.settings[0]),
        "words": found.words,
        "wins": found.wins,
        "differences": differences,
    }


def _flat(prefix: str, settings: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
