"""Metrics for Prometheus: those that the router's snapshot declares, and what only the gateway sees."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated, Final

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fd_core.http.bodies import BodyStats
from fd_core.http.connections.connections import ConnectionStats
from fd_core.http.metrics import Histogram, metric_families, refusal_family
from fd_core.http.supervision import TaskStats
from fd_core.router.router import Router
from fd_core.router.snapshot import OUTCOMES, RouterSnapshot
from fd_core.types.metrics import counter

__all__ = ["GatewayCounts", "GatewayMetrics"]

_SELECTING: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_FIRST_BYTE: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayCounts(msgspec.Struct):
    """What became of requests, as far as only the gateway sees it; every count only grows."""

    disconnects: Annotated[int, counter("disconnects", "Clients that left before their answer ended.")] = 0
    attempts_lost: Annotated[
        int, counter("attempts_lost", "Attempts whose worker was lost before the first byte of its answer.")
    ] = 0
    streams_broken: Annotated[
        int, counter("streams_broken", "Answers whose worker was lost after their first byte.")
    ] = 0
    transfers: Annotated[
        dict[str, int],
        counter("transfers", "Attempts on a pair, by what became of the KV of the prompt.", label="outcome"),
    ] = msgspec.field(default_factory=Counter)


class GatewayMetrics:
    """All metrics of one gateway."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.counts = GatewayCounts()
        self.choosing = Histogram(
            "fdcore_router_choosing_seconds",
            "Time from the arrival of a request to the selection of its worker, in seconds.",
            _SELECTING,
        )
        self.first_byte = Histogram(
            "fdcore_router_first_byte_seconds",
            "Time from the arrival of a request to the first byte of its answer, in seconds.",
            _FIRST_BYTE,
        )
        self.answers: Counter[tuple[str, int]] = Counter()
        self.refusals: Counter[tuple[str, str]] = Counter()
        """Of `AccessControl`."""
        self.doors: tuple[object, ...] = (ConnectionStats(), BodyStats(), TaskStats())
        """Of what listens; others once the gateway does."""
        self._process = ProcessCollector(registry=CollectorRegistry())

    async def text(self) -> bytes:
        """Return everything in Prometheus' text format, written on another thread: a worker takes 0.1 ms."""
        snapshot = self._router.snapshot()
        others = [*self._others(snapshot), *self._process.collect()]
        return await asyncio.to_thread(lambda: generate_latest(_Collected(_of_workers(snapshot), others)))

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is at this moment."""
        snapshot = self._router.snapshot()
        yield from _of_workers(snapshot)
        yield from self._others(snapshot)

    def _others(self, snapshot: RouterSnapshot) -> Iterator[Metric]:
        """Yield what does not grow with the workers."""
        yield from metric_families("fdcore_router_", [({}, snapshot)])
        for stats in (self.counts, *self.doors):
            yield from metric_families("fdcore_router_", [({}, stats)])
        yield self.choosing.family()
        yield self.first_byte.family()
        outcomes = CounterMetricFamily(
            "fdcore_router_outcomes",
            "Attempts given to workers that ended, by role and outcome.",
            labels=("role", "outcome"),
        )
        for role, counts in snapshot.roles.items():
            for outcome in OUTCOMES:
                outcomes.add_metric((role, outcome), getattr(counts, outcome))
        yield outcomes
        answers = CounterMetricFamily(
            "fdcore_router_answers", "HTTP responses begun, by path and status.", labels=("path", "status")
        )
        for (path, status), count in self.answers.items():
            answers.add_metric((path, str(status)), count)
        yield answers
        yield refusal_family("fdcore_router_", self.refusals)


def _of_workers(snapshot: RouterSnapshot) -> Iterator[Metric]:
    workers = [({"worker": one.worker.url, "role": one.worker.role}, one) for one in snapshot.workers]
    yield from metric_families("fdcore_router_worker_", workers)


class _Collected(Collector):
    """What is written when it is asked for."""

    def __init__(self, *parts: Iterable[Metric]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        return chain(*self._parts)
