"""Figures of the server over the last hours, in a ring buffer, for the curves of its page."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from fd_core.engine.process.messages import EngineStats

SECONDS: Final = 15.0
"""Interval of samples."""
CAPACITY: Final = 1440
"""Samples that are kept: six hours."""

Durations = Mapping[str, Mapping[str, Sequence[float]]]
"""Histograms as `fd_core.server.state.ServerMetrics.durations` returns them."""


class HistorySample(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Figures of one interval, by the names of the page's curves; None if unknown, as while the engine restarts."""

    at: float
    """End of the interval, in seconds of the clock passed in."""
    running: int | None
    waiting: int | None
    kv: float | None
    """Share of the KV blocks in use."""
    generated: float | None
    """Tokens a second, like `prompt`."""
    prompt: float | None
    preempted: float | None
    """Preemptions a second."""
    ttft50: float | None
    """Time to first token, in seconds: median and 95th percentile."""
    ttft95: float | None
    tpot50: float | None
    """Time per output token, likewise."""
    tpot95: float | None


class History:
    """The samples since the start of the server, at most `CAPACITY`."""

    def __init__(self) -> None:
        self._samples: deque[HistorySample] = deque(maxlen=CAPACITY)
        self._last: tuple[float, EngineStats, Durations] | None = None
        """Origin of the last sample; None after an interval without an engine."""

    async def run(self, read: Callable[[], tuple[EngineStats, Durations] | None]) -> None:
        """Record what `read` returns in each interval, None without an engine, until cancelled."""
        while True:
            self.record(time.monotonic(), read())
            await asyncio.sleep(SECONDS)

    def record(self, now: float, read: tuple[EngineStats, Durations] | None) -> None:
        """Append a sample."""
        if read is None:
            self._last = None
            self._samples.append(HistorySample(at=now, **dict.fromkeys(HistorySample.__struct_fields__[1:])))
            return
        stats, durations = read
        before, self._last = self._last, (now, stats, durations)
        then, old, earlier = before or (now, stats, {})
        slots, blocks = stats.scheduler.slots, stats.scheduler.blocks

        def rate(count: Callable[[EngineStats], int]) -> float | None:
            grown = count(stats) - count(old)
            return None if now <= then or grown < 0 else _short(grown / (now - then))

        def quantile(name: str, share: float) -> float | None:
            bounds, counts = durations[name]["bounds"], durations[name]["counts"]
            previous = earlier[name]["counts"] if name in earlier else counts
            return quantile_of(bounds, [new - old for new, old in zip(counts, previous, strict=True)], share)

        self._samples.append(
            HistorySample(
                at=now,
                running=slots.running + slots.loading + slots.draining,
                waiting=slots.waiting,
                kv=_short((blocks.used + blocks.fenced) / blocks.total) if blocks.total else 0.0,
                generated=rate(lambda each: each.scheduler.outputs.generated_tokens),
                prompt=rate(lambda each: each.scheduler.counters.prompt_tokens),
                preempted=rate(lambda each: each.scheduler.counters.preemptions),
                ttft50=quantile("time_to_first_token", 0.5),
                ttft95=quantile("time_to_first_token", 0.95),
                tpot50=quantile("inter_token", 0.5),
                tpot95=quantile("inter_token", 0.95),
            )
        )

    def shown(self, now: float) -> dict[str, Any]:
        """Return the samples for the page: column names, rows, and the time `now` on the clock of the rows."""
        return {"now": now, "columns": HistorySample.__struct_fields__, "rows": tuple(self._samples)}


def quantile_of(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """Return the quantile of a histogram, linear within a bucket; None if it counted nothing."""
    wanted, below = share * sum(counts), 0.0
    if wanted <= 0:
        return None
    for index, count in enumerate(counts):
        if count and below + count >= wanted:
            low = bounds[index - 1] if index else 0.0
            high = bounds[index] if index < len(bounds) else low
            return _short(low + (high - low) * (wanted - below) / count)
        below += count
    return None


def _short(value: float) -> float:
    """Return a value with four digits."""
    return float(f"{value:.4g}")
