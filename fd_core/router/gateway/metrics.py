"""Metrics for Prometheus: what the router shows of itself, and what only the gateway sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fd_core.router.router import Router
from fd_core.router.snapshot import RouterSnapshot, WorkerSnapshot
from fd_core.router.workers import WorkerState
from fd_core.server.metrics import Histogram

__all__ = ["GatewayMetrics"]

_CHOOSING: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_FIRST_BYTE: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_GAUGES: Final[Sequence[tuple[str, str, Callable[[WorkerSnapshot], float]]]] = (
    ("healthy", "Whether health checks pass", lambda w: w.state is WorkerState.HEALTHY),
    ("circuit_closed", "Whether the circuit breaker lets requests through", lambda w: w.circuit == "closed"),
    ("requests", "Requests that it was given and that have not ended", lambda w: w.load.requests),
    ("requests_waiting", "Those of which no byte came yet", lambda w: w.load.waiting),
    ("prefill_tokens", "Tokens of the prompts of those", lambda w: w.load.prefill_tokens),
    ("index_blocks", "Blocks of prompts that it is believed to hold, as it served them", lambda w: w.index_blocks),
    ("tells_kv", "Whether it tells which prefixes it holds", lambda w: w.held_blocks is not None),
    ("held_blocks", "Blocks of its own size that it says it holds", lambda w: w.held_blocks or 0),
)
_COUNTERS: Final[Sequence[tuple[str, str, Callable[[WorkerSnapshot], int]]]] = (
    ("selected", "Times it was chosen", lambda w: w.tally.selected),
    ("served", "Answers that ended well", lambda w: w.tally.served),
    ("failed", "Attempts that failed", lambda w: w.tally.failed),
    ("declined", "Attempts that it had no room for, or not the model", lambda w: w.tally.declined),
    ("unused", "Answers that ended well without its prefill", lambda w: w.tally.unused),
    ("left", "Attempts that ended without either, such as by a client that left", lambda w: w.tally.left),
    ("prompt_blocks", "Blocks of prompts looked up", lambda w: w.tally.prompt_blocks),
    ("hit_blocks", "Those of them that it was believed to hold", lambda w: w.tally.hit_blocks),
    ("kv_events", "Times that it told which prefixes it came to hold or lost", lambda w: w.kv_events),
)


class GatewayMetrics(Collector):
    """All metrics of one gateway, in a registry of its own."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.choosing = Histogram("fdcore_router_choosing_seconds", "From a request's body to its worker", _CHOOSING)
        self.first_byte = Histogram(
            "fdcore_router_first_byte_seconds", "From a request's body to the first byte of its answer", _FIRST_BYTE
        )
        self.answers: Counter[tuple[str, int]] = Counter()
        self.disconnects = 0
        """Clients that left before their answer ended."""
        self.attempts_lost = 0
        """Attempts that ended before their first byte."""
        self.streams_broken = 0
        """Answers that broke off behind it."""
        self.transfers: Counter[str] = Counter()
        """Attempts on a pair by the outcome that the decode worker told."""
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known without asking."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is at this moment."""
        snapshot = self._router.snapshot()
        yield from _of_workers(snapshot)
        yield from _of_router(snapshot)
        yield self.choosing.family()
        yield self.first_byte.family()
        answers = CounterMetricFamily("fdcore_router_answers", "Answers by path and status", labels=("path", "status"))
        for (path, status), count in self.answers.items():
            answers.add_metric((path, str(status)), count)
        yield answers
        transfers = CounterMetricFamily(
            "fdcore_router_transfers", "Attempts on a pair by what became of the prefill", labels=("outcome",)
        )
        for outcome, count in self.transfers.items():
            transfers.add_metric((outcome,), count)
        yield transfers
        for name, text, count in (
            ("disconnects", "Clients that left before their answer ended", self.disconnects),
            ("attempts_lost", "Attempts that ended before their first byte", self.attempts_lost),
            ("streams_broken", "Answers that broke off behind their first byte", self.streams_broken),
        ):
            yield CounterMetricFamily(f"fdcore_router_{name}", text, value=count)


def _of_workers(snapshot: RouterSnapshot) -> Iterator[Metric]:
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(f"fdcore_router_worker_{name}", text, labels=("worker", "role"))
        for each in snapshot.workers:
            gauge.add_metric((each.worker.url, each.worker.role), float(value(each)))
        yield gauge
    for name, text, count in _COUNTERS:
        counter = CounterMetricFamily(f"fdcore_router_worker_{name}", text, labels=("worker", "role"))
        for each in snapshot.workers:
            counter.add_metric((each.worker.url, each.worker.role), count(each))
        yield counter


def _of_router(snapshot: RouterSnapshot) -> Iterator[Metric]:
    for name, text, value in (
        ("requests", "Requests that are counted anywhere, on workers that are gone too", snapshot.total.requests),
        ("requests_waiting", "Those of which no byte came yet", snapshot.total.waiting),
        ("prefill_tokens", "Tokens of the prompts of those", snapshot.total.prefill_tokens),
    ):
        yield GaugeMetricFamily(f"fdcore_router_{name}", text, value=value)
    for name, text, value in (
        ("retries", "Attempts on another worker", snapshot.retries),
        ("faults", "Releases or verdicts that came twice or too late; 0 if all is right", snapshot.faults),
        ("prompt_blocks", "Blocks of prompts looked up", snapshot.tally.prompt_blocks),
        ("hit_blocks", "Those of them that the chosen worker was believed to hold", snapshot.tally.hit_blocks),
    ):
        yield CounterMetricFamily(f"fdcore_router_{name}", text, value=value)
    attempts = CounterMetricFamily("fdcore_router_attempts", "Attempts on a mixed worker or a pair", labels=("mode",))
    for mode, count in snapshot.modes.items():
        attempts.add_metric((mode,), count)
    yield attempts
    outcomes = CounterMetricFamily(
        "fdcore_router_outcomes", "What became of what workers were given", labels=("role", "outcome")
    )
    for role, tally in snapshot.roles.items():
        for outcome in ("served", "failed", "declined", "unused", "left"):
            outcomes.add_metric((role, outcome), getattr(tally, outcome))
    yield outcomes
    refused = CounterMetricFamily("fdcore_router_refused", "Requests that got no worker", labels=("reason",))
    for reason, count in snapshot.refused.items():
        refused.add_metric((reason,), count)
    yield refused
