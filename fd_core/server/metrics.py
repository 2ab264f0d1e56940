"""Metrics for Prometheus: gauges and counters read from the engine when asked, histograms fed by the streams.

Everything here runs on the event loop's thread, so nothing is locked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import fd_core
from fd_core.engine.client import EngineClient
from fd_core.engine.messages import EngineStats
from fd_core.server.kv_metrics import kv_metrics
from fd_core.server.lease_metrics import lease_metrics

__all__ = ["Histogram", "ServerMetrics"]

_TTFT: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN: Final = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.4, 1.0, 2.5, 10.0)
_END_TO_END: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_GAUGES: Final[Sequence[tuple[str, str, Callable[[EngineStats], float]]]] = (
    ("requests_running", "Requests in a slot", lambda s: s.running),
    ("requests_loading", "Requests in a slot whose KV is being loaded", lambda s: s.loading),
    ("requests_waiting", "Requests waiting for a slot", lambda s: s.waiting),
    ("take_backs_in_flight", "Slots taken back whose acknowledgement is awaited", lambda s: s.take_backs_in_flight),
    ("kv_blocks_used", "KV blocks owned by requests", lambda s: s.kv_blocks_used),
    ("kv_blocks_fenced", "KV blocks freed but still touched by work in flight", lambda s: s.kv_blocks_fenced),
    ("kv_blocks_cached", "Free KV blocks that hold a reusable prefix", lambda s: s.kv_blocks_cached),
    ("kv_blocks", "KV blocks in all", lambda s: s.kv_blocks_total),
    (
        "kv_usage_ratio",
        "Share of KV blocks that are not free",
        lambda s: (s.kv_blocks_used + s.kv_blocks_fenced) / s.kv_blocks_total if s.kv_blocks_total else 0.0,
    ),
)
_COUNTERS: Final[Sequence[tuple[str, str, Callable[[EngineStats], int]]]] = (
    ("steps", "Steps answered", lambda s: s.steps),
    ("budget_used_tokens", "Tokens computed", lambda s: s.budget_used),
    ("budget_limit_tokens", "Tokens that the step budgets allowed", lambda s: s.budget_limit),
    ("prompt_tokens", "Tokens of prompts", lambda s: s.prompt_tokens),
    ("generated_tokens", "Tokens generated", lambda s: s.generated_tokens),
    ("preemptions", "Requests taken back to make room", lambda s: s.preemptions),
    ("recomputed_tokens", "Tokens computed again after a preemption", lambda s: s.recomputed_tokens),
    ("prefix_queries_tokens", "Prompt tokens looked up in the prefix cache", lambda s: s.prefix_queries),
    ("prefix_hits_tokens", "Prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
    ("drafts_proposed_tokens", "Draft tokens verified", lambda s: s.drafts_proposed),
    ("drafts_accepted_tokens", "Draft tokens kept", lambda s: s.drafts_accepted),
    ("kv_loads", "Requests that waited for KV from outside the device", lambda s: s.loads),
    ("kv_restored_tokens", "Tokens not computed because their KV was loaded", lambda s: s.loaded_tokens),
    ("kv_lost_tokens", "Tokens that were to be loaded and had to be computed after all", lambda s: s.lost_tokens),
    ("kv_declined_loads", "Loads left undone because computing was estimated to be sooner", lambda s: s.declined),
    ("kv_declined_tokens", "Tokens that were computed instead", lambda s: s.declined_tokens),
    ("kv_saved_tokens", "Tokens whose KV was copied from the device", lambda s: s.saved_tokens),
    ("stale_outputs", "Outputs dropped because epoch, step or generation did not match", lambda s: s.stale_outputs),
)

_BY_POSITION: Final[Sequence[tuple[str, str, Callable[[EngineStats], Sequence[int]]]]] = (
    (
        "drafts_proposed_per_position_tokens",
        "Draft tokens verified, by position; 0 is right behind the last token",
        lambda s: s.drafts_proposed_per_position,
    ),
    (
        "drafts_accepted_per_position_tokens",
        "Draft tokens kept, by position; 0 is right behind the last token",
        lambda s: s.drafts_accepted_per_position,
    ),
)
"""Without samples where nothing is drafted."""


class Histogram:
    """Counts of durations in seconds, cheap to feed."""

    __slots__ = ("bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = text
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count a duration that occurred `times` times."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    def family(self) -> HistogramMetricFamily:
        """Return the histogram as Prometheus wants it: cumulative."""
        bounds = [*map(str, self.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self.counts)), strict=True))
        return HistogramMetricFamily(self.name, self.help, buckets=buckets, sum_value=self.total)


class ServerMetrics(Collector):
    """All metrics of one server, in a registry of its own."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.ttft = Histogram("fdcore_time_to_first_token_seconds", "From a request's start to its first token", _TTFT)
        self.inter_token = Histogram("fdcore_inter_token_seconds", "Between tokens of one generation", _INTER_TOKEN)
        self.end_to_end = Histogram("fdcore_end_to_end_seconds", "From a request's start to its end", _END_TO_END)
        self.outcomes: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error", "disconnect"), 0))
        self.answers: Counter[tuple[str, int]] = Counter()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known without asking an engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is at this moment."""
        yield from self._engine()
        yield self.ttft.family()
        yield self.inter_token.family()
        yield self.end_to_end.family()
        generations = CounterMetricFamily("fdcore_generations", "Generations ended, by outcome", labels=["outcome"])
        for outcome, count in self.outcomes.items():
            generations.add_metric([outcome], count)
        yield generations
        answers = CounterMetricFamily("fdcore_http_answers", "HTTP answers begun", labels=["path", "status"])
        for (path, status), count in sorted(self.answers.items()):
            answers.add_metric([path, str(status)], count)
        yield answers

    def _engine(self) -> Iterator[Metric]:
        client, stats = self._client, self._client.stats
        for name, text, gauge in _GAUGES:
            yield GaugeMetricFamily(f"fdcore_{name}", text, gauge(stats))
        for name, text, counter in _COUNTERS:
            yield CounterMetricFamily(f"fdcore_{name}", text, counter(stats))
        for name, text, counts in _BY_POSITION:
            family = CounterMetricFamily(f"fdcore_{name}", text, labels=["position"])
            for position, count in enumerate(counts(stats)):
                family.add_metric([str(position)], count)
            yield family
        yield from kv_metrics(stats, client.info.block_size)
        yield from lease_metrics(stats.leases)
        finished = CounterMetricFamily("fdcore_engine_finished", "Requests that the engine ended", labels=["reason"])
        for reason in ("stop", "length", "abort", "error"):
            finished.add_metric([reason], getattr(stats, f"finished_{reason}"))
        yield finished
        yield GaugeMetricFamily("fdcore_engine_up", "1 while the engine answers", float(client.alive))
        yield GaugeMetricFamily("fdcore_engine_epoch", "Grows with each start of the engine", client.info.epoch)
        requeued = client.requests_requeued
        yield CounterMetricFamily("fdcore_requests_requeued", "Requests that a new epoch took up", requeued)
        yield GaugeMetricFamily("fdcore_active_requests", "Generations of this server", client.active_requests)
        info = InfoMetricFamily("fdcore", "What is served")
        facts = {key: str(getattr(client.info, key)) for key in ("model", "architecture", "backend", "device", "dtype")}
        info.add_metric([], {"version": fd_core.__version__, **facts})
        yield info
