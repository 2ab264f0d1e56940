"""Output of a comparison: tables on the terminal and in Markdown, a chart, every round as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fd_core.cli.bench.compare.engines import ENGINES, JUDGES, TITLES
from fd_core.cli.bench.compare.rounds import Measurements
from fd_core.cli.bench.compare.stats import AGREEMENT_TOKENS, Summary
from fd_core.cli.bench.compare.workloads import SHAPES
from fd_core.config.outputs import write_json, write_whole


@dataclass(frozen=True, slots=True)
class Comparison:
    """A finished comparison."""

    command: str
    mode: str
    date: str
    reference: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    threads: int
    weight_bytes: int
    engines: Mapping[str, Mapping[str, Any]]
    measurements: Measurements
    summaries: Sequence[Summary]

    def heading(self) -> str:
        """Return one line on machine, mode and the least time of a decode step."""
        loads = self.measurements.loads
        bandwidth = max(self.measurements.bandwidths)  # other work only lowers it
        return (
            f"{self.machine['cpu']}, {self.threads} of {self.machine['cores']} cores, {self.date}, {self.mode}; memory "
            f"reads at {bandwidth / 1e9:.1f} GB/s, so one pass over the bf16 weights ({self.weight_bytes / 1e6:.0f} "
            f"MB) takes {self.weight_bytes / bandwidth * 1e3:.1f} ms; load average {min(loads):.1f} to {max(loads):.1f}"
        )

    def legend(self) -> str:
        """Return the explanation of the columns."""
        return (
            f"Medians over rounds; ratio: output tokens/s over {self.reference}'s of the same round, median; TTFT and "
            "TPOT: median request of the median round; of floor: the time of one pass over the bf16 weights over TPOT; "
            f"agrees: share of the first {AGREEMENT_TOKENS} greedy tokens equal, up to the first difference, to the "
            f"first of {', '.join(JUDGES)} that ran and is another engine."
        )

    def by_workload(self) -> dict[str, list[Summary]]:
        """Group the rows by workload, in the order of the table of engines."""
        groups: dict[str, list[Summary]] = {}
        for summary in sorted(self.summaries, key=lambda s: list(ENGINES).index(s.engine)):
            groups.setdefault(summary.workload, []).append(summary)
        return {name: groups[name] for name in SHAPES if name in groups}


COLUMNS = ("engine", "output tok/s", "min to max", "ratio", "TTFT ms", "TPOT ms", "of floor", "agrees")


def row(summary: Summary) -> tuple[str, ...]:
    """Return the cells of one engine, as COLUMNS names them."""
    low, high = summary.output_tps_range
    return (
        summary.engine,
        f"{summary.output_tps:.0f}",
        f"{low:.0f} to {high:.0f}",
        "" if summary.ratio is None else f"{summary.ratio:.2f}",
        f"{summary.ttft_s * 1e3:.0f}",
        "" if math.isnan(summary.tpot_s) or summary.tpot_s <= 0 else f"{summary.tpot_s * 1e3:.1f}",
        "" if summary.floor_share is None else f"{summary.floor_share:.0%}",
        "" if summary.agreement is None else f"{summary.agreement:.0%}",
    )


def show(report: Comparison, console: Console) -> None:
    """Print the tables."""
    console.print(report.heading(), highlight=False)
    for workload, summaries in report.by_workload().items():
        table = Table(title=f"{workload}: {SHAPES[workload].title}", title_justify="left")
        for i, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if i else "left", no_wrap=not i)
        for summary in summaries:
            table.add_row(*row(summary))
        console.print(table)
    for engine, reason in report.measurements.failures.items():
        console.print(f"{engine} left out: {reason}", highlight=False, markup=False)
    console.print(report.legend(), highlight=False)


def write(report: Comparison, name: Path, flag: str) -> list[Path]:
    """Write NAME.json (every round), NAME.md (the tables and the command) and NAME.svg (the chart); return them."""
    paths = [name.with_name(f"{name.name}.{suffix}") for suffix in ("json", "md", "svg")]
    write_json(paths[0], report, flag)
    write_whole(paths[1], _markdown(report, name.name).encode(), flag)
    label = f"Output tokens per second on {report.threads} threads of {report.machine['cpu']}, {report.date}"
    write_whole(paths[2], chart(report.summaries, label).encode(), flag)
    return paths


def _markdown(report: Comparison, name: str) -> str:
    lines = [f"# {name}", "", f"    {report.command}", "", report.heading() + ".", ""]
    for workload, summaries in report.by_workload().items():
        lines += [f"## {workload}: {SHAPES[workload].title}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line(row(s)) for s in summaries]
        lines.append("")
    lines += [f"- {engine} left out: {reason}" for engine, reason in report.measurements.failures.items()]
    if report.measurements.failures:
        lines.append("")
    versions = "; ".join(
        f"{engine}: {facts['version']}, {facts['precision']}" for engine, facts in report.engines.items()
    )
    lines += [report.legend(), "", f"Versions: {versions}.", ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


_WIDTH, _BAR, _GAP, _LEFT = 760, 16, 5, 150
_OURS, _OTHERS = "#009485", "#7a8b8b"
"""Colours of bars: three to one and more on white, as WCAG 2.1 requires of graphics."""


def chart(summaries: Iterable[Summary], label: str) -> str:
    """Return bars of output tokens a second as SVG: each engine's share of the fastest one, by workload."""
    rates = {(each.engine, each.workload): each.output_tps for each in summaries}
    lines, y = [], 14
    for workload in (name for name in SHAPES if any(each == name for _, each in rates)):
        lines.append(f'<text x="0" y="{y + 12}" font-weight="600">{SHAPES[workload].title}</text>')
        y += 24
        most = max(rate for (_, which), rate in rates.items() if which == workload)
        for engine in (name for name in ENGINES if (name, workload) in rates):
            rate, colour = rates[engine, workload], _OURS if engine.startswith("fd_core") else _OTHERS
            width = (_WIDTH - _LEFT - 60) * rate / most
            lines += [
                f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{TITLES.get(engine, engine)}</text>',
                f'<rect x="{_LEFT}" y="{y}" width="{width:.0f}" height="{_BAR}" rx="3" fill="{colour}"/>',
                f'<text x="{_LEFT + width + 6:.0f}" y="{y + 13}">{rate:,.0f}</text>',
            ]
            y += _BAR + _GAP
        y += 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {_WIDTH + 20} {y}" '
        f'font-family="system-ui, sans-serif" '
        f'font-size="13" fill="#1d2b2b" role="img" aria-label="{escape(label)}">'
    )
    return "\n".join((head, f'<rect x="-10" width="{_WIDTH + 20}" height="{y}" fill="#ffffff"/>', *lines, "</svg>", ""))
