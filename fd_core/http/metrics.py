"""Prometheus metrics of every server of the project: histograms, and the metrics that statistics declare.

Everything here runs on the event loop's thread, so nothing is locked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fd_core.types.metrics import MetricSpec, read_metrics


class Histogram:
    """Counts of durations in seconds, or of lengths in tokens; cheap to feed."""

    __slots__ = ("bounds", "counts", "help", "name", "total", "vllm")

    def __init__(self, name: str, text: str, bounds: Sequence[float], vllm: tuple[str, ...] = ()) -> None:
        self.name = name
        self.help = text
        self.vllm = vllm
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that occurred `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(
        self, name: str | None = None, labels: Mapping[str, str] = MappingProxyType({})
    ) -> HistogramMetricFamily:
        """Return the histogram in Prometheus' form: cumulative; `name` overrides its own."""
        bounds = [*map(str, self.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self.counts)), strict=True))
        family = HistogramMetricFamily(name or self.name, self.help, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), buckets, self.total)
        return family


class Collected(Collector):
    """Metrics that were collected before, for `generate_latest`."""

    def __init__(self, *parts: Iterable[Metric]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        return chain(*self._parts)


def count_family(name: str, text: str, labels: Sequence[str], counts: Mapping[Any, int]) -> Metric:
    """Return a counter whose samples are `counts`, by one label's value or by a tuple of them."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric([*map(str, values)] if isinstance(values, tuple) else [values], count)
    return family


def metric_families(
    prefix: str,
    parts: Iterable[tuple[Mapping[str, str], object]],
    names: Callable[[MetricSpec], Iterable[str]] = lambda spec: (spec.name, *spec.old),
) -> Iterable[Metric]:
    """Return every metric that statistics declare, in Prometheus' form, under `names`; labels distinguish `parts`."""
    families: dict[str, Metric] = {}
    for common, stats in parts:
        for spec, samples in read_metrics(stats):
            for name in names(spec):
                if name not in families:
                    family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
                    families[name] = family(prefix + name, spec.help, labels=(*common, *spec.label_names))
                for labels, value in samples:
                    families[name].add_metric((*common.values(), *labels), value)  # type: ignore[attr-defined]
    return families.values()


def refusal_family(prefix: str, refusals: Mapping[tuple[str, str], int]) -> Metric:
    """Return the counter of requests rejected by limits of API keys."""
    text = "Requests rejected by a limit of their API key, by name of the key."
    return count_family(f"{prefix}key_refusals", text, ["key", "limit"], counts=refusals)
