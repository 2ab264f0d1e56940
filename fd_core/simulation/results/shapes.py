"""What a page draws of a run, in a size that does not grow with it: distributions, and means over time."""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec
import numpy as np

from fd_core.simulation.results.outcomes import Run
from fd_core.simulation.results.summary import Numbers, column, latencies_of, percentiles

__all__ = ["SHARES", "TimeBins", "distributions", "over_time"]

SHARES: Final = (*map(float, range(1, 99)), 99.0, 99.5, 99.9, 99.99)
"""Percentiles that stand for a distribution."""
_BINS: Final = 160
_MOST_ROWS: Final = 32


class TimeBins(msgspec.Struct, frozen=True, kw_only=True):
    """A run over time: `start` to `end` in equal bins; each number is a mean over its bin."""

    start: float
    end: float
    arrivals: tuple[float, ...]
    """A second."""
    completions: tuple[float, ...]
    """A second; requests that were completed."""
    waiting: tuple[float, ...]
    """In all workers together, as is `running`."""
    running: tuple[float, ...]
    kv_use: tuple[float, ...]
    """Share of KV blocks that requests hold, mean of the workers that serve."""
    rows: tuple[str, ...]
    """Workers, at most 32: beyond that each row is the mean of some that follow one another."""
    row_waiting: tuple[tuple[float, ...], ...]
    row_running: tuple[tuple[float, ...], ...]
    row_kv_use: tuple[tuple[float, ...], ...]
    row_absent: tuple[tuple[float, ...], ...]
    """Share of the time in which nobody was served: there was no process, or an engine was loaded."""


def distributions(run: Run) -> dict[str, tuple[float, ...]]:
    """Return the percentiles at `SHARES` of each latency that completed requests have, seconds."""
    return {name: tuple(percentiles(values, SHARES)) for name, values in latencies_of(run).items() if len(values)}


def over_time(run: Run) -> TimeBins | None:
    """Return how a run went over time; None if nothing was sampled or no time passed."""
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

    waiting, running = table(column(run.samples, "waiting")), table(column(run.samples, "running"))
    kv_use = table(column(run.samples, "used_blocks") / blocks[worker])
    absent = np.zeros((len(run.workers), _BINS))
    for each in run.absences:
        absent[each.worker] += np.diff(np.clip(edges, each.begin, each.end)) / np.diff(edges)
    groups = np.array_split(np.arange(len(run.workers)), min(len(run.workers), _MOST_ROWS))
    a_second = partial(_a_second, edges)
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


def _a_second(edges: Numbers, times: Numbers) -> tuple[float, ...]:
    return _plain(np.histogram(times, edges)[0] / np.diff(edges))


def _plain(values: Numbers) -> tuple[float, ...]:
    return tuple(values.tolist())
