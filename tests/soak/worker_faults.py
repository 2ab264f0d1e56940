"""Faults of workers while they serve: a plan made from a seed, and its execution."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from tests.soak.cluster import Cluster, Node

__all__ = ["KINDS", "SHORT", "UNREACHABLE_SECONDS", "Executed", "Kind", "WorkerFault", "inject_all", "plan"]

Kind = Literal["kill", "stop", "hang", "kill_engine", "drain"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
SHORT: Final[tuple[Kind, ...]] = ("kill", "stop", "kill_engine", "drain")
UNREACHABLE_SECONDS: Final = 8
"""Time for which a stopped worker may stall its streams: longer than a stop, shorter than a hang."""
_SECONDS: Final[dict[Kind, tuple[float, float]]] = {"stop": (3.0, 6.0), "hang": (12.0, 14.0)}
_SECONDS_AWAY: Final = (0.2, 1.2)
_RECOVERS_SECONDS: Final = 120.0
_BUSY_SECONDS: Final = 5.0
"""Seconds to wait until a worker that is to be killed has requests to lose."""


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """One fault of one worker, by its number."""

    kind: Kind
    worker: int
    seconds: float
    """Seconds that the worker is down or stopped before it is restarted or resumed."""


@dataclass(slots=True)
class Executed:
    """Faults injected so far."""

    hits: list[tuple[float, float]] = field(default_factory=list)
    """Intervals in which workers were killed or hung: from just before until they were certainly lost."""
    drained: list[tuple[float, float]] = field(default_factory=list)
    """Intervals in which workers drained: from just before until they had exited."""
    injected: list[str] = field(default_factory=list)
    requests_hit: int = 0
    """Requests that the router counted on those workers just before."""


def plan(
    roles: Sequence[str], seed: int, *, kinds: Sequence[Kind] = KINDS, rounds: int = 1
) -> dict[str, list[WorkerFault]]:
    """Return for each role every kind of fault, `rounds` times, in random order and for random workers."""
    rng = random.Random(seed)
    lanes = {}
    for role in sorted(set(roles)):
        those = [number for number, each in enumerate(roles) if each == role]
        lane = [
            WorkerFault(kind, rng.choice(those), rng.uniform(*_SECONDS.get(kind, _SECONDS_AWAY)))
            for kind in kinds * rounds
        ]
        rng.shuffle(lane)
        lanes[role] = lane
    return lanes


async def inject_all(
    lane: Sequence[WorkerFault], cluster: Cluster, done: Executed, begins: Callable[[float], Awaitable[None]]
) -> None:
    """Inject all faults of one role into its workers, one after the other.

    The next fault starts once the cluster has recovered and `begins` returns, which is called with a share of the run.
    """
    for number, fault in enumerate(lane):
        await begins((number + 0.5) / (len(lane) + 1))
        worker, at = cluster.workers[fault.worker], time.monotonic()
        await _INJECTIONS[fault.kind](cluster, worker, fault.seconds, done)
        await cluster.wait_ready(worker, seconds=_RECOVERS_SECONDS)
        done.injected.append(f"{fault.kind} {worker.name}: recovered after {time.monotonic() - at:.1f} s")


async def _kill(cluster: Cluster, worker: Node, seconds: float, done: Executed) -> None:
    before = await _about_to_hit(cluster, worker, done)
    await worker.kill()
    done.hits.append((before, time.monotonic()))
    await asyncio.sleep(seconds)
    worker.start()


async def _stop(cluster: Cluster, worker: Node, seconds: float, done: Executed) -> None:
    worker.send_all(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    worker.send_all(signal.SIGCONT)


async def _hang(cluster: Cluster, worker: Node, seconds: float, done: Executed) -> None:
    before = await _about_to_hit(cluster, worker, done)
    worker.send_all(signal.SIGSTOP)
    done.hits.append((before, time.monotonic()))
    await asyncio.sleep(seconds)
    worker.send_all(signal.SIGCONT)


async def _kill_engine(cluster: Cluster, worker: Node, seconds: float, done: Executed) -> None:
    epoch = (await cluster.metrics(worker))["engine_epoch"]
    os.kill(worker.engine(), signal.SIGKILL)
    ends = time.monotonic() + _RECOVERS_SECONDS
    while (await cluster.metrics(worker))["engine_epoch"] == epoch:
        assert time.monotonic() < ends, f"{worker.name} has not restarted its engine:\n{worker.log_text()}"
        await asyncio.sleep(0.1)


async def _drain(cluster: Cluster, worker: Node, seconds: float, done: Executed) -> None:
    before = time.monotonic()
    await worker.leave()
    done.drained.append((before, time.monotonic()))
    await asyncio.sleep(seconds)
    worker.start()


async def _about_to_hit(cluster: Cluster, worker: Node, done: Executed) -> float:
    """Wait until the worker has requests to lose; return the time."""
    ends = time.monotonic() + _BUSY_SECONDS
    while not (running := await _requests_at(cluster, worker)) and time.monotonic() < ends:
        await asyncio.sleep(0.01)
    done.requests_hit += running
    return time.monotonic()


async def _requests_at(cluster: Cluster, worker: Node) -> int:
    shown = (await cluster.status())["workers"]
    return sum(each["load"]["requests"] for each in shown if each["worker"]["url"] == worker.url)


_INJECTIONS: Final = {"kill": _kill, "stop": _stop, "hang": _hang, "kill_engine": _kill_engine, "drain": _drain}
