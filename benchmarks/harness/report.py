"""Output of a comparison: a table on the terminal, every round as JSON, a short Markdown table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .engines import ENGINES, JUDGES
from .rounds import Measurements
from .stats import AGREEMENT_TOKENS, Summary
from .workloads import SHAPES


@dataclass(frozen=True, slots=True)
class Report:
    """A finished comparison."""

    name: str
    command: str
    mode: str
    reference: str
    machine: Mapping[str, Any]
    threads: int
    weight_bytes: int
    engines: Mapping[str, Mapping[str, Any]]
    measurements: Measurements
    summaries: Sequence[Summary]

    @property
    def bandwidth(self) -> float:
        """The highest of the bandwidths measured before each round, bytes/s: a floor wants the best case."""
        return max(self.measurements.bandwidths)

    @property
    def floor_s(self) -> float:
        """Least seconds of a decode step: the bf16 weights read once."""
        return self.weight_bytes / self.bandwidth

    def heading(self) -> str:
        """Return one line on machine, mode and floor."""
        loads = self.measurements.loads
        return (
            f"{self.machine['cpu']}, {self.threads} of {self.machine['cores']} cores, {self.mode}; memory reads at "
            f"{self.bandwidth / 1e9:.1f} GB/s, so one pass over the bf16 weights ({self.weight_bytes / 1e6:.0f} MB) "
            f"takes {self.floor_s * 1e3:.1f} ms; load average {min(loads):.1f} to {max(loads):.1f}"
        )


COLUMNS = ("engine", "precision", "output tok/s", "min to max", "ratio", "TTFT ms", "TPOT ms", "of floor", "agrees")


def row(summary: Summary) -> tuple[str, ...]:
    """Return the cells of one engine, as COLUMNS names them."""
    low, high = summary.output_tps_range
    return (
        summary.engine,
        ENGINES[summary.engine].precision,
        f"{summary.output_tps:.0f}",
        f"{low:.0f} to {high:.0f}",
        "" if summary.ratio is None else f"{summary.ratio:.2f}",
        f"{summary.ttft_s * 1e3:.0f}",
        "" if math.isnan(summary.tpot_s) or summary.tpot_s <= 0 else f"{summary.tpot_s * 1e3:.1f}",
        "" if summary.floor_share is None else f"{summary.floor_share:.0%}",
        "" if summary.agreement is None else f"{summary.agreement:.0%}",
    )


def legend(report: Report) -> str:
    """Return the explanation of the columns."""
    return (
        f"Medians over rounds; ratio: output tokens/s over {report.reference}'s of the same round, median; TTFT and "
        "TPOT: median request of the median round; of floor: the time of one pass over the bf16 weights over TPOT; "
        f"agrees: share of the first {AGREEMENT_TOKENS} greedy tokens equal, up to the first difference, to the "
        f"first of {', '.join(JUDGES)} that ran and is another engine."
    )


def by_workload(report: Report) -> dict[str, list[Summary]]:
    """Group the rows by workload, in the order of the table of engines."""
    groups: dict[str, list[Summary]] = {}
    for summary in report.summaries:
        groups.setdefault(summary.workload, []).append(summary)
    position = {name: i for i, name in enumerate(ENGINES)}
    return {name: sorted(rows, key=lambda s: position[s.engine]) for name, rows in groups.items()}


def show(report: Report, console: Console) -> None:
    """Print the tables."""
    console.print(report.heading())
    for workload, summaries in by_workload(report).items():
        table = Table(title=f"{workload}: {SHAPES[workload].title}", title_justify="left")
        for i, column in enumerate(COLUMNS):
            table.add_column(column, justify="left" if i < 2 else "right")
        for summary in summaries:
            table.add_row(*row(summary))
        console.print(table)
    for engine, reason in report.measurements.failures.items():
        console.print(f"[yellow]{engine} left out[/]: {reason}", highlight=False)
    console.print(legend(report))


def write(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write NAME.json (every round) and NAME.md (the table and its command); return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = folder / f"{report.name}.json", folder / f"{report.name}.md"
    as_json.write_text(json.dumps(_values(report), indent=1) + "\n")
    as_markdown.write_text(_markdown(report))
    return as_json, as_markdown


def _values(report: Report) -> dict[str, Any]:
    measured = report.measurements
    return {
        "command": report.command,
        "mode": report.mode,
        "machine": report.machine,
        "threads": report.threads,
        "bandwidth_bytes_per_s": measured.bandwidths,
        "load_average": measured.loads,
        "weight_bytes": report.weight_bytes,
        "floor_s_per_step": report.floor_s,
        "reference": report.reference,
        "engines": report.engines,
        "failures": measured.failures,
        "summaries": [asdict(s) for s in report.summaries],
        "rounds": [
            {
                "engine": run.engine,
                "workload": run.workload,
                "round": run.round,
                "wall_s": run.wall_s,
                "output_tps": run.output_tps,
                "ttft_s": [r.ttft_s for r in run.requests],
                "end_s": [r.end_s for r in run.requests],
                "first_tokens": [list(r.token_ids[:AGREEMENT_TOKENS]) for r in run.requests],
            }
            for run in measured.runs
        ],
    }


def _markdown(report: Report) -> str:
    lines = [f"# {report.name}", "", f"    {report.command}", "", report.heading() + ".", ""]
    for workload, summaries in by_workload(report).items():
        lines += [f"## {workload}: {SHAPES[workload].title}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line(row(s)) for s in summaries]
        lines.append("")
    for engine, reason in report.measurements.failures.items():
        lines.append(f"- {engine} left out: {reason}")
    if report.measurements.failures:
        lines.append("")
    versions = "; ".join(f"{name}: {facts['version']}" for name, facts in report.engines.items())
    lines += [legend(report), "", f"Versions: {versions}.", ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
