"""Requests that each worker was given and has not finished.

Only a `Selection` writes here: it holds what was counted for it on each of its workers and gives that back. The load
of a worker is the sum over its selections, so at idle every counter is exactly zero, and none can be negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec
import numpy as np

from fd_core.router.places import Numbers, Places
from fd_core.router.workers import RouterWorker
from fd_core.types.metrics import gauge

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

    def __init__(self, on_idle: Callable[[RouterWorker], None], places: Places) -> None:
        """`on_idle` is called with each worker whose last request ended."""
        self._by_worker: dict[RouterWorker, WorkerLoad] = {}
        self._places = places
        self._columns = np.zeros((len(msgspec.structs.fields(WorkerLoad)), 16), np.int64)
        """The same by field and place."""
        self._on_idle = on_idle
        self.faults = 0
        """Releases and verdicts that came twice or too late: always 0 if the callers are right."""

    def of(self, worker: RouterWorker) -> WorkerLoad:
        """Return the load of one incarnation, gone or not."""
        return self._by_worker.get(worker, IDLE)

    def at(self, places: Numbers) -> Numbers:
        """Return the loads of workers by their places, as they are now: shape [fields of `WorkerLoad`, n]."""
        self._make_room()
        return self._columns.take(places, axis=1)

    def by_worker(self) -> dict[RouterWorker, WorkerLoad]:
        """Return the load of every incarnation that has one, gone or not."""
        return dict(self._by_worker)

    def add(self, worker: RouterWorker, load: WorkerLoad) -> None:
        """Count `load` on `worker`."""
        self._set(worker, self.of(worker).plus(load))

    def subtract(self, worker: RouterWorker, load: WorkerLoad) -> None:
        """Give back what was added."""
        left = self._by_worker[worker].minus(load)
        self._set(worker, left)
        if left != IDLE:
            return
        del self._by_worker[worker]
        self._on_idle(worker)

    def _set(self, worker: RouterWorker, load: WorkerLoad) -> None:
        self._by_worker[worker] = load
        place = self._places.of(worker)
        self._make_room()
        self._columns[:, place] = load.requests, load.waiting, load.prefill_tokens

    def _make_room(self) -> None:
        fields, length = self._columns.shape
        if len(self._places) > length:
            longer = np.zeros((fields, 2 * len(self._places)), np.int64)
            longer[:, :length] = self._columns
            self._columns = longer
