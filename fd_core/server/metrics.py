"""Metrics for Prometheus: gauges and counters read from the engine when asked, histograms fed by the streams.

Everything here runs on the event loop's thread, so nothing is locked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import fd_core
from fd_core.engine.client import EngineClient
from fd_core.metrics import read_metrics

__all__ = ["Histogram", "ServerMetrics", "metric_families"]

_TTFT: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN: Final = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.4, 1.0, 2.5, 10.0)
_END_TO_END: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)


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
        self.ttft = Histogram(
            "fdcore_time_to_first_token_seconds",
            "Time from the arrival of a request, before its body is read, to its first token, in seconds.",
            _TTFT,
        )
        self.inter_token = Histogram(
            "fdcore_inter_token_seconds", "Time between two tokens of one generation, in seconds.", _INTER_TOKEN
        )
        self.end_to_end = Histogram(
            "fdcore_end_to_end_seconds",
            "Time from the arrival of a request at the server to its last token, in seconds.",
            _END_TO_END,
        )
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
        generations = CounterMetricFamily("fdcore_generations", "Generations ended, by outcome.", labels=["outcome"])
        for outcome, count in self.outcomes.items():
            generations.add_metric([outcome], count)
        yield generations
        answers = CounterMetricFamily(
            "fdcore_http_answers", "HTTP responses begun, by path and status.", labels=["path", "status"]
        )
        for (path, status), count in sorted(self.answers.items()):
            answers.add_metric([path, str(status)], count)
        yield answers

    def _engine(self) -> Iterator[Metric]:
        client = self._client
        yield from metric_families("fdcore_", [({}, client.stats)])
        yield _gauge("engine_up", "1 while the engine answers, 0 otherwise.", float(client.alive))
        yield _gauge("engine_epoch", "Number of starts of the engine.", client.info.epoch)
        yield CounterMetricFamily(
            "fdcore_requests_requeued", "Requests given to a restarted engine.", client.requests_requeued
        )
        yield _gauge("active_requests", "Generations of this server that have not ended.", client.active_requests)
        info = InfoMetricFamily("fdcore", "Model, backend and version of this server.")
        facts = {key: str(getattr(client.info, key)) for key in ("model", "architecture", "backend", "device", "dtype")}
        info.add_metric([], {"version": fd_core.__version__, **facts})
        yield info


def metric_families(prefix: str, parts: Iterable[tuple[Mapping[str, str], object]]) -> Iterable[Metric]:
    """Return every metric that statistics declare, as Prometheus wants it.

    `parts` are labels that tell their samples apart, all of the same names, and statistics.
    """
    families: dict[str, Metric] = {}
    for common, stats in parts:
        for spec, samples in read_metrics(stats):
            if spec.name not in families:
                family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
                families[spec.name] = family(prefix + spec.name, spec.help, labels=(*common, *spec.label_names))
            for labels, value in samples:
                families[spec.name].add_metric((*common.values(), *labels), value)  # type: ignore[attr-defined]
    return families.values()


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"fdcore_{name}", text, value)
