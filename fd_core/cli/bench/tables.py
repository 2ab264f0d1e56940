"""Show a benchmark's figures as tables and keep them as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from fd_core.cli.bench.results import BenchmarkReport
from fd_core.errors import ConfigError

__all__ = ["check_writable", "show", "show_burst", "show_queue", "show_router", "show_steps", "write"]


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


def show_steps(console: Console, cases: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print what steps cost, one row for each of the `cases` that `StepTimes.figures` returns."""
    table = Table(title=f"{title}, microseconds a step", title_justify="left")
    for name in ("running", "drafts", "", "median", "p99", "mean", "a request"):
        table.add_column(name, justify="left" if name == "" else "right")
    for case in cases:
        heads = (f"{case['running']:,}", str(case["drafts"]))
        for part, row in case["us"].items():
            share = f"{row['median'] / case['running']:.2f}"
            table.add_row(*heads, part, *(f"{value:,.0f}" for value in row.values()), share)
            heads = ("", "")
        table.add_section()
    console.print(table)


def show_queue(console: Console, cases: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print plans beside a full and an empty queue, from `cases` that `queue_figures` returned."""
    table = Table(title=f"{title}, microseconds a plan", title_justify="left")
    for name in ("running", "drafts", "queue", "median", "p99", "mean", "times"):
        table.add_column(name, justify="left" if name == "queue" else "right")
    for case in cases:
        heads = (f"{case['running']:,}", str(case["drafts"]))
        for queue, row in case["plan_us"].items():
            ratio = f"{case['ratio']:.2f}" if queue == "waiting" else ""
            table.add_row(*heads, queue, *(f"{value:,.0f}" for value in row.values()), ratio)
            heads = ("", "")
        table.add_section()
    console.print(table)


def show_burst(console: Console, burst: Mapping[str, Any], title: str) -> None:
    """Print what adding and planning cost until all prompts run, from what `burst_figures` returned."""
    table = Table(title=f"{title}, microseconds of the processor", title_justify="left")
    for name in ("", "median", "p99", "mean", "worst"):
        table.add_column(name, justify="left" if name == "" else "right")
    for name, row, worst in (
        ("add a request", burst["add_us"], ""),
        ("plan a step", burst["plan_us"], f"{burst['worst_plan_us']:,.0f}"),
    ):
        table.add_row(name, *(f"{value:,.0f}" for value in row.values()), worst)
    console.print(table)


def show_router(console: Console, cases: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print what selecting and releasing cost, one row for each of the `cases` that `RouterTimes.figures` returns."""
    table = Table(title=f"{title}, microseconds a request", title_justify="left")
    for name in ("in flight", "", "median", "p99"):
        table.add_column(name, justify="left" if name == "" else "right")
    for case in cases:
        head = f"{case['in_flight']:,}"
        for part, row in case["us"].items():
            table.add_row(head, part, *(f"{value:,.0f}" for value in row.values()))
            head = ""
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
