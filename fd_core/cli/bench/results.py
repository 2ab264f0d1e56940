"""Results of a benchmark: from token timestamps to statistics, tables and JSON.

TTFT: time to first token. TPOT: time per output token after the first. ITL: time between two arrivals. E2E: the
whole request. All in seconds here and in milliseconds in tables and files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from fd_core.errors import ConfigError

PERCENTILES: Final = (50, 90, 99)
OBJECTIVES: Final = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One request as the client observed it; times are seconds of one clock."""

    sent: float
    arrivals: tuple[float, ...] = ()
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.arrivals[0] - self.sent if self.arrivals else math.nan

    @property
    def tpot(self) -> float:
        """Time per output token after the first, seconds; NaN for fewer than two tokens."""
        if self.output_tokens < 2 or not self.arrivals:
            return math.nan
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """Whole request, seconds."""
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        """Times between arrivals, seconds."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def meets(self, limits: Mapping[str, float]) -> bool:
        """Return True if it succeeded within every limit, in seconds; a missing measure cannot fail."""
        return self.error is None and not any(getattr(self, name) > limit for name, limit in limits.items())


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """The figures of one run."""

    duration_s: float
    completed: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    latencies: dict[str, list[float]]
    """Samples in seconds by measure."""
    good: int | None = None
    """Requests that met every objective, if there were any objectives."""
    errors: dict[str, int] = field(default_factory=dict)

    def rates(self) -> dict[str, float]:
        """Return requests and tokens per second."""
        seconds = max(self.duration_s, 1e-9)
        rates = {
            "requests_per_s": self.completed / seconds,
            "output_tokens_per_s": self.output_tokens / seconds,
            "total_tokens_per_s": (self.prompt_tokens + self.output_tokens) / seconds,
        }
        if self.good is not None:
            rates["goodput_requests_per_s"] = self.good / seconds
        return rates

    def milliseconds(self) -> dict[str, dict[str, float]]:
        """Return mean and percentiles of each measure with samples, in milliseconds."""
        table: dict[str, dict[str, float]] = {}
        for name, seconds in self.latencies.items():
            values = np.asarray([value for value in seconds if not math.isnan(value)]) * 1e3
            if len(values):
                table[name] = {"mean": float(values.mean())}
                table[name] |= {f"p{share}": float(np.percentile(values, share)) for share in PERCENTILES}
        return table

    def as_json(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "settings": dict(settings),
            "duration_s": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            **self.rates(),
            "latency_ms": self.milliseconds(),
            "errors": self.errors,
        }


def report(
    timelines: Sequence[RequestTimes], duration_s: float, limits: Mapping[str, float] | None = None
) -> BenchmarkReport:
    """Summarize the requests of one run; `limits` in seconds decide which of them were good."""
    whole = [timeline for timeline in timelines if timeline.error is None]
    return BenchmarkReport(
        duration_s=duration_s,
        completed=len(whole),
        failed=len(timelines) - len(whole),
        prompt_tokens=sum(timeline.prompt_tokens for timeline in whole),
        output_tokens=sum(timeline.output_tokens for timeline in whole),
        latencies={
            "TTFT": [timeline.ttft for timeline in whole],
            "TPOT": [timeline.tpot for timeline in whole],
            "ITL": [gap for timeline in whole for gap in timeline.gaps],
            "E2E": [timeline.e2e for timeline in whole],
        },
        good=sum(timeline.meets(limits) for timeline in timelines) if limits else None,
        errors=Counter(timeline.error for timeline in timelines if timeline.error is not None),
    )


def microseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, p99 and mean in microseconds."""
    table = {"median": np.median(seconds), "p99": np.percentile(seconds, 99), "mean": np.mean(seconds)}
    return {name: float(value) * 1e6 for name, value in table.items()}


def objectives(texts: Sequence[str]) -> dict[str, float]:
    """Read objectives such as `ttft:300` (milliseconds) and return limits in seconds. Raises `ConfigError`."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in OBJECTIVES or not 0 < limit < math.inf:
            message = f"--goodput: expected one of {', '.join(OBJECTIVES)} with milliseconds, got {text!r}"
            raise ConfigError(message, field="--goodput", hint="for example ttft:300")
        limits[name] = limit / 1e3
    return limits


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
        "total_tokens_per_s": "Total tokens per second",
        "goodput_requests_per_s": "Good requests per second",
    }
    for name, value in report.rates().items():
        rates.add_row(labels[name], f"{value:,.2f}")
    console.print(rates)
    milliseconds = report.milliseconds()
    if milliseconds:
        columns = list(next(iter(milliseconds.values())))
        heads = (Column(column, justify="right") for column in columns)
        latency = Table("", *heads, title="Latency, milliseconds", title_justify="left")
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
    """Print median, p99 and mean, in microseconds, of each part of each of `cases`, which `heads` identify."""
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
