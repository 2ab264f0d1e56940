"""State shared by the parts of one gateway, and its metrics."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric

from fd_core.http.access.control import AccessControl
from fd_core.http.bodies import BodyBudget, BodyStats
from fd_core.http.connections.connections import ConnectionStats
from fd_core.http.draining import Drain
from fd_core.http.metrics import Collected, Histogram, count_family, metric_families, refusal_family
from fd_core.http.spans import RequestSpans
from fd_core.http.supervision import Supervisor, TaskStats
from fd_core.router.config import GatewayConfig
from fd_core.router.gateway.http1.workers import WorkerClient
from fd_core.router.gateway.requests.route_requests import CostReader, RouteRequestReader
from fd_core.router.router import OUTCOMES, Router, RouterSnapshot
from fd_core.router.selection import Mode
from fd_core.types.metrics import counter

log = logging.getLogger(__name__)

_SELECTING: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_FIRST_BYTE: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayCounts(msgspec.Struct):
    """Outcomes of requests that only the gateway observes; every count only grows."""

    disconnects: Annotated[int, counter("disconnects", "Clients that disconnected before their answer ended.")] = 0
    attempts_lost: Annotated[
        int, counter("attempts_lost", "Attempts whose worker was lost before the first byte of its answer.")
    ] = 0
    streams_broken: Annotated[
        int, counter("streams_broken", "Answers whose worker was lost after their first byte.")
    ] = 0
    transfers: Annotated[
        dict[str, int],
        counter("transfers", "Attempts on a pair, by the outcome of the KV transfer.", label="outcome"),
    ] = msgspec.field(default_factory=Counter)


class GatewayMetrics:
    """All metrics of one gateway."""

    def __init__(
        self,
        router: Router,
        *,
        refusals: Counter[tuple[str, str]] | None = None,
        stats: tuple[object, ...] = (ConnectionStats(), BodyStats(), TaskStats()),
    ) -> None:
        """`refusals`: counters of `AccessControl`; `stats`: statistics of the listeners."""
        self._router = router
        self.refusals = Counter() if refusals is None else refusals
        self._stats = stats
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
        self._process = ProcessCollector(registry=CollectorRegistry())

    async def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, written on another thread: a worker takes 0.1 ms."""
        snapshot = self._router.snapshot()
        others = [*self._others(snapshot), *self._process.collect()]
        return await asyncio.to_thread(lambda: generate_latest(Collected(_of_workers(snapshot), others)))

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its current value."""
        snapshot = self._router.snapshot()
        yield from _of_workers(snapshot)
        yield from self._others(snapshot)

    def _others(self, snapshot: RouterSnapshot) -> Iterator[Metric]:
        yield from metric_families("fdcore_router_", [({}, snapshot)])
        for stats in (self.counts, *self._stats):
            yield from metric_families("fdcore_router_", [({}, stats)])
        yield self.choosing.family()
        yield self.first_byte.family()
        ended = {(role, name): getattr(counts, name) for role, counts in snapshot.roles.items() for name in OUTCOMES}
        text = "Ended attempts on workers, by role and outcome."
        yield count_family("fdcore_router_outcomes", text, ("role", "outcome"), counts=ended)
        text = "HTTP responses started, by path and status."
        yield count_family("fdcore_router_answers", text, ("path", "status"), counts=self.answers)
        yield refusal_family("fdcore_router_", self.refusals)


def _of_workers(snapshot: RouterSnapshot) -> Iterable[Metric]:
    workers = [({"worker": one.worker.url, "role": one.worker.role}, one) for one in snapshot.workers]
    return metric_families("fdcore_router_worker_", workers)


class PairingLog:
    """Logs when decode workers begin to compute prompts themselves, and when pairs are available again."""

    def __init__(self) -> None:
        self._alone = False

    def saw(self, mode: Mode) -> None:
        """Record the mode of an attempt."""
        if mode == "mixed" or (mode == "alone") is self._alone:
            return
        self._alone = mode == "alone"
        if self._alone:
            log.warning("no prefill worker is available: decode workers compute prompts themselves until one is")
        else:
            log.info("a prefill worker is available again: pairs compute prompts")


@dataclass(slots=True)
class GatewayState:
    """State that all handlers of the gateway share."""

    config: GatewayConfig
    router: Router
    client: WorkerClient
    """Client for requests to workers."""
    reader: RouteRequestReader
    """Reads the prompts of requests; replaced when the workers' tokenizer becomes known."""
    ticket_key: bytes | None
    """Key of the tickets for pairs. Without one every prompt is computed by the decode worker."""
    metrics: GatewayMetrics
    bodies: BodyBudget
    """Memory for bodies, held until a worker has responded and no retry needs them."""
    access: AccessControl = field(default_factory=AccessControl)
    """The router's API keys and their usage."""
    costs: CostReader = field(default_factory=lambda: CostReader(None))
    """Counts the tokens of requests whose keys limit them; replaced together with `reader`."""
    pairing: PairingLog = field(default_factory=PairingLog)
    supervisor: Supervisor = field(default_factory=Supervisor)
    drain: Drain = field(default_factory=Drain)
    spans: RequestSpans | None = None
    name: str = field(default_factory=lambda: f"fdcore-{uuid.uuid4().hex}")
    """Name in the header `Via` of the requests to workers."""
    worker_secret: bytes = field(init=False)
    """Signs the tenants of requests: the digest of the workers' key, as they store it."""
    requires_keys: bool = field(init=False)
    """True if clients need a key of the router, which is not sent to workers."""
    own_headers: Mapping[str, str] = field(init=False)
    """Headers of requests to workers that the gateway itself makes."""

    def __post_init__(self) -> None:
        self.requires_keys = self.config.requires_keys
        key = next(iter(self.config.worker_api_keys), "")
        self.worker_secret = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        self.own_headers = {"Authorization": f"Bearer {key}"} if key else {}
