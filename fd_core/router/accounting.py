"""Requests that each worker was given and has not finished.

Only a `Selection` writes here: it holds what was counted for it on each of its workers and gives that back. The load
of a worker is the sum over its selections, so at idle every counter is exactly zero, and none can be negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Final

import msgspec

from fd_core.metrics import gauge
from fd_core.router.workers import RouterWorker

__all__ = ["IDLE", "WorkerLoad", "WorkerLoads"]


class WorkerLoad(msgspec.Struct, frozen=True):
    """The load of one incarnation, or the part of one selection."""

    requests: Annotated[int, gauge("requests", "Requests in flight: given to a worker and not ended.")] = 0
    waiting: Annotated[int, gauge("requests_waiting", "Requests in flight whose answer has not begun.")] = 0
    prefill_tokens: Annotated[
        int,
        gauge(
            "prefill_tokens",
            "Prompt tokens to compute for requests whose answer has not begun, without tokens believed to be cached.",
        ),
    ] = 0

    def plus(self, other: WorkerLoad) -> WorkerLoad:
        """Return the sum of both loads."""
        return WorkerLoad(
            self.requests + other.requests,
            self.waiting + other.waiting,
            self.prefill_tokens + other.prefill_tokens,
        )

    def minus(self, other: WorkerLoad) -> WorkerLoad:
        """Return this load without `other`."""
        return WorkerLoad(
            self.requests - other.requests,
            self.waiting - other.waiting,
            self.prefill_tokens - other.prefill_tokens,
        )


IDLE: Final = WorkerLoad()


class WorkerLoads:
    """The load of every incarnation."""

    def __init__(self, on_idle: Callable[[RouterWorker], None]) -> None:
        """`on_idle` is called with each worker whose last request ended."""
        self._by_worker: dict[RouterWorker, WorkerLoad] = {}
        self._on_idle = on_idle
        self.faults = 0
        """Releases and verdicts that came twice or too late: always 0 if the callers are right."""

    def of(self, worker: RouterWorker) -> WorkerLoad:
        """Return the load of one incarnation, gone or not."""
        return self._by_worker.get(worker, IDLE)

    def of_each(self, workers: Iterable[RouterWorker]) -> list[WorkerLoad]:
        """Return the load of each of `workers`."""
        return [self._by_worker.get(worker, IDLE) for worker in workers]

    def by_worker(self) -> dict[RouterWorker, WorkerLoad]:
        """Return the load of every incarnation that has one, gone or not."""
        return dict(self._by_worker)

    def add(self, worker: RouterWorker, load: WorkerLoad) -> None:
        """Count `load` on `worker`."""
        self._by_worker[worker] = self.of(worker).plus(load)

    def subtract(self, worker: RouterWorker, load: WorkerLoad) -> None:
        """Give back what was added."""
        left = self._by_worker[worker].minus(load)
        if left != IDLE:
            self._by_worker[worker] = left
            return
        del self._by_worker[worker]
        self._on_idle(worker)
