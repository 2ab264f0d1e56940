"""Samples of the router and the workers during faults, and their leaks at the end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from tests.server.processes import GAUGES
from tests.soak.cluster import Cluster, Node, Usage

__all__ = ["Watch", "at_rest", "gauges_of", "usages"]

_EVERY_SECONDS: Final = 0.5
_NOTHING: Final = {"requests": 0, "waiting": 0, "prefill_tokens": 0}
_COUNTERS: Final = (
    *("preemptions_total", "requests_requeued", "prefix_hits", "stale_outputs", "prefills_elsewhere"),
    *(
        "kv_leases_ended",
        "kv_leases_refused",
        "kv_fetched_tokens",
        "kv_sent_blocks",
        "kv_transfer_dropped",
        "engine_finished_total",
    ),
)
"""Counters that show whether a run has covered everything that it was meant to cover."""
_OPEN_LEASES: Final = "leases_open"
_ROUTER_GAUGES: Final = (
    *("router_requests", "router_prefill_tokens"),
    *("router_worker_requests", "router_worker_prefill_tokens"),
)


@dataclass(slots=True)
class Watch:
    """Samples taken during a run."""

    cluster: Cluster
    samples: int = 0
    most_requests: int = 0
    most_by_gauge: dict[str, float] = field(default_factory=dict)
    resident_bytes: list[int] = field(default_factory=list)
    """Samples of the router."""
    violations: set[str] = field(default_factory=set)
    _counted: dict[tuple[str, int, float], dict[str, float]] = field(default_factory=dict)

    def counted(self) -> Counter[str]:
        """Return the counters of every worker process, up to its last sample."""
        total: Counter[str] = Counter()
        for counts in self._counted.values():
            total.update({name: int(count) for name, count in counts.items() if count})
        return total

    async def watch(self) -> None:
        """Take samples until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(_EVERY_SECONDS)

    async def sample(self) -> None:
        """Sample every process."""
        await self._router()
        for worker in self.cluster.workers:
            await self._worker(worker)

    async def _router(self) -> None:
        shown = await self.cluster.status()
        self.samples += 1
        self.resident_bytes.append(self.cluster.router.usage().resident_bytes)
        self.most_requests = max(self.most_requests, shown["total"]["requests"])
        if shown["faults"]:
            self.violations.add(f"the router counts {shown['faults']} faults")
        loads = [shown["total"], *(each["load"] for each in shown["workers"]), *(each[1] for each in shown["departed"])]
        if any(value < 0 for load in loads for value in load.values()):
            self.violations.add(f"a negative load: {loads}")
        self._not_negative("router", await self.cluster.metrics(self.cluster.router))

    async def _worker(self, worker: Node) -> None:
        try:
            async with asyncio.timeout(1.0):
                metrics = await self.cluster.metrics(worker)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return  # a fault is being injected
        self._not_negative(worker.name, metrics)
        life = (worker.name, worker.starts, metrics["engine_epoch"])
        self._counted[life] = {name: count for name, count in metrics.items() if name.startswith(_COUNTERS)}
        for name in gauges_of(metrics):
            self.most_by_gauge[name] = max(self.most_by_gauge.get(name, 0.0), metrics[name])

    def _not_negative(self, name: str, metrics: dict[str, float]) -> None:
        self.violations |= {f"{name}: {sample} is {value}" for sample, value in metrics.items() if value < 0}


def gauges_of(metrics: dict[str, float]) -> dict[str, float]:
    """Return a worker's gauges that only requests and leases raise."""
    names = (*GAUGES, "requests_loading", *(name for name in metrics if _OPEN_LEASES in name))
    return {name: metrics[name] for name in names}


async def at_rest(cluster: Cluster, seconds: float) -> float:
    """Wait until all counts are zero; return the seconds that it took."""
    began = time.monotonic()
    while True:
        left = await _left(cluster)
        if not left:
            return time.monotonic() - began
        assert time.monotonic() < began + seconds, f"still counted after {seconds:g} s: {left}"
        await asyncio.sleep(0.1)


async def _left(cluster: Cluster) -> dict[str, object]:
    shown = await cluster.status()
    metrics = await cluster.metrics(cluster.router)
    held = {
        "router": (shown["total"], shown["departed"]),
        **{each["worker"]["url"]: each["load"] for each in shown["workers"]},
        **{name: value for name, value in metrics.items() if name.startswith(_ROUTER_GAUGES)},
    }
    left = {key: value for key, value in held.items() if value not in (0, _NOTHING, (_NOTHING, []))}
    for worker in cluster.workers:
        gauges = {name: value for name, value in gauges_of(await cluster.metrics(worker)).items() if value}
        if gauges:
            left[worker.name] = gauges
    return left


def usages(cluster: Cluster) -> dict[str, Usage]:
    """Return the resources of every process by name."""
    return {node.name: node.usage() for node in (cluster.router, *cluster.workers)}
