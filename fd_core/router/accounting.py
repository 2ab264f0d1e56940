"""Requests that each worker was given and has not finished: one guard for each worker of a selection.

A guard holds what was counted on one incarnation, and is the only thing that gives it back: the prefill tokens at the
first token, the rest at the end. The load of a worker is the sum of its guards, so at idle every counter is exactly
zero, and none can be negative. Mixed and disaggregated requests take the same way: the guard of a prefill worker ends
at the first token, every other guard at the end of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from fd_core.metrics import gauge
from fd_core.router.workers import RouterWorker

__all__ = ["IDLE", "Guard", "WorkerLoad", "WorkerLoads"]


class WorkerLoad(msgspec.Struct, frozen=True):
    """The load of one incarnation, or the part of one guard."""

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


class Guard:
    """What one selection counts on one worker; made by `WorkerLoads.take`, given back exactly once by `release`."""

    __slots__ = ("_ends_at_first_token", "_held", "_loads", "_released", "worker")

    def __init__(
        self, loads: WorkerLoads, worker: RouterWorker, held: WorkerLoad, *, ends_at_first_token: bool
    ) -> None:
        self.worker = worker
        self._loads = loads
        self._held = held
        self._ends_at_first_token = ends_at_first_token
        self._released = False

    @property
    def held(self) -> WorkerLoad:
        """The load that this guard holds at this moment."""
        return self._held

    @property
    def released(self) -> bool:
        """Whether the guard has given back everything."""
        return self._released

    def first_token(self) -> None:
        """Give back what counted for prefill, for a prefill worker everything. Later calls do nothing."""
        if self._released:
            return
        if self._ends_at_first_token:
            self.release()
            return
        self._give_back(msgspec.structs.replace(self._held, requests=0))

    def release(self) -> bool:
        """Give back the rest, exactly once. A second call changes nothing, is counted as a fault and returns False."""
        if self._released:
            self._loads.fault()
            return False
        self._released = True
        self._give_back(self._held)
        return True

    def _give_back(self, part: WorkerLoad) -> None:
        self._held = self._held.minus(part)
        self._loads.settle(self.worker, part)


class WorkerLoads:
    """The load of every incarnation; only guards write to it."""

    def __init__(self, on_idle: Callable[[RouterWorker], None] | None = None) -> None:
        """`on_idle` is called with each worker whose last request ended."""
        self._by_worker: dict[RouterWorker, WorkerLoad] = {}
        self._on_idle = on_idle
        self._faults = 0

    @property
    def faults(self) -> int:
        """Releases and verdicts that came twice or too late: always 0 if the callers are right."""
        return self._faults

    def fault(self) -> None:
        """Count a call that came twice or too late."""
        self._faults += 1

    def take(self, worker: RouterWorker, prefill_tokens: int, *, ends_at_first_token: bool = False) -> Guard:
        """Count one request with `prefill_tokens` left to compute on `worker`; the guard gives the count back."""
        held = WorkerLoad(requests=1, waiting=1, prefill_tokens=prefill_tokens)
        self._by_worker[worker] = self.of(worker).plus(held)
        return Guard(self, worker, held, ends_at_first_token=ends_at_first_token)

    def of(self, worker: RouterWorker) -> WorkerLoad:
        """Return the load of one incarnation, gone or not."""
        return self._by_worker.get(worker, IDLE)

    def by_worker(self) -> dict[RouterWorker, WorkerLoad]:
        """Return the load of every incarnation that has one, gone or not."""
        return dict(self._by_worker)

    def settle(self, worker: RouterWorker, part: WorkerLoad) -> None:
        """Subtract a part of what a guard held; called by the guards alone."""
        left = self._by_worker[worker].minus(part)
        if left != IDLE:
            self._by_worker[worker] = left
            return
        del self._by_worker[worker]
        if self._on_idle is not None:
            self._on_idle(worker)
