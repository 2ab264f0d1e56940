"""Show a benchmark's figures as tables and keep them as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from fd_core.cli.bench.results import BenchmarkReport
from fd_core.errors import ConfigError


def show(console: Console, report: BenchmarkReport, title: str) -> None:
    """Print the figures of one run."""
    rates = Table(title=title, title_justify="left", show_header=False)
    rates.add_row("Requests completed", f"{report.completed:,}")
    if report.failed:
        rates.add_row("Requests failed", f"[red]{report.failed:,}[/red]")
    rates.add_row("Duration", f"{report.duration_s:.2f} s")
    rates.add_row("Prompt tokens", f"{report.prompt_tokens:,}")
    rates.add_row("Output tokens", f"{report.output_tokens:,}")
    labels = {
        "requests_per_s": "Requests per second",
        "output_tokens_per_s": "Output tokens per second",
        "total_tokens_per_s": "All tokens per second",
        "goodput_requests_per_s": "Good requests per second",
    }
    for name, value in report.rates().items():
        rates.add_row(labels[name], f"{value:,.2f}")
    console.print(rates)
    milliseconds = report.milliseconds()
    if milliseconds:
        latency = Table(title="Latency, milliseconds", title_justify="left")
        columns = list(next(iter(milliseconds.values())))
        latency.add_column("")
        for column in columns:
            latency.add_column(column, justify="right")
        for name, row in milliseconds.items():
            latency.add_row(name, *(f"{row[column]:,.2f}" for column in columns))
        console.print(latency)
    for message, times in report.errors.items():
        console.print(f"{times} x {message}", style="red", markup=False, highlight=False)


def show_times(
    console: Console,
    title: str,
    cases: Sequence[Mapping[str, Any]],
    *,
    heads: Sequence[str] = (),
    times: str = "us",
    last: tuple[str, Callable[[Mapping[str, Any], str], str]] | None = None,
) -> None:
    """Print a row of median, p99 and mean, in microseconds, for each part of each of `cases`.

    `heads` are the fields that tell cases apart, `times` is the field that holds the parts, and `last` the name of one
    more column with what it shows for a case and a part.
    """
    table = Table(title=title, title_justify="left")
    for name in (*heads, "", "median", "p99", "mean", *([last[0]] if last else [])):
        table.add_column(name.replace("_", " "), justify="right" if name else "left")
    for case in cases:
        shown = [f"{case[head]:,}" for head in heads]
        for part, row in case[times].items():
            figures = [f"{row[name]:,.0f}" for name in ("median", "p99", "mean")]
            table.add_row(*shown, part, *figures, *([last[1](case, part)] if last else []))
            shown = [""] * len(heads)
        table.add_section()
    console.print(table)


def check_writable(path: Path | None) -> None:
    """Refuse a result file that cannot be written before the measuring starts. Raises `ConfigError`."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--json: cannot write {path}: no such folder or not a file", field="--json")


def write(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures, plain values, as JSON if a file was named."""
    if path is None:
        return
    text = msgspec.json.format(msgspec.json.encode(figures), indent=2)
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror}", field="--json") from error
