"""What each worker has been given and has not finished: one guard for each worker of a selection.

A guard holds what was counted on one incarnation, and is the only thing that gives it back: the prefill tokens at the
first token, the rest at the end. What the guards in force hold is the count, so at idle every counter is exactly zero,
and none can be negative. Mixed and disaggregated requests take the same way: a guard of the prefill side ends at the
first token, every other at the end of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from fd_core.router.workers import Worker

__all__ = ["IDLE", "Guard", "Ledger", "Load"]


class Load(msgspec.Struct, frozen=True):
    """What runs on one incarnation, or what one guard holds of that."""

    requests: int = 0
    """Requests that it was given and that have not ended there."""
    waiting: int = 0
    """Those of them of which no token came yet."""
    prefill_tokens: int = 0
    """Tokens of the prompts of those, without what the worker was believed to hold or to compute already."""

    def plus(self, other: Load) -> Load:
        """Both together."""
        return Load(
            self.requests + other.requests,
            self.waiting + other.waiting,
            self.prefill_tokens + other.prefill_tokens,
        )

    def minus(self, other: Load) -> Load:
        """This without `other`."""
        return Load(
            self.requests - other.requests,
            self.waiting - other.waiting,
            self.prefill_tokens - other.prefill_tokens,
        )


IDLE: Final = Load()


class Guard:
    """What one selection counts on one worker; made by `Ledger.take`, given back exactly once by `release`."""

    __slots__ = ("_ends_at_first_token", "_held", "_ledger", "_released", "worker")

    def __init__(self, ledger: Ledger, worker: Worker, held: Load, *, ends_at_first_token: bool) -> None:
        self.worker = worker
        self._ledger = ledger
        self._held = held
        self._ends_at_first_token = ends_at_first_token
        self._released = False

    @property
    def held(self) -> Load:
        """What it holds at this moment."""
        return self._held

    @property
    def released(self) -> bool:
        """Whether it has given back everything."""
        return self._released

    def first_token(self) -> None:
        """Give back what counted for prefill, on the prefill side everything. Later calls do nothing."""
        if self._released:
            return
        if self._ends_at_first_token:
            self.release()
            return
        self._give_back(msgspec.structs.replace(self._held, requests=0))

    def release(self) -> bool:
        """Give back the rest, exactly once. A second call changes nothing, is counted as a fault and returns False."""
        if self._released:
            self._ledger.fault()
            return False
        self._released = True
        self._give_back(self._held)
        return True

    def _give_back(self, part: Load) -> None:
        self._held = self._held.minus(part)
        self._ledger.settle(self.worker, part)


class Ledger:
    """The load of every incarnation; only guards write to it."""

    def __init__(self, on_idle: Callable[[Worker], None] | None = None) -> None:
        """`on_idle` is called with each worker whose last request ended."""
        self._loads: dict[Worker, Load] = {}
        self._on_idle = on_idle
        self._faults = 0

    @property
    def faults(self) -> int:
        """How often something was given back or reported twice: always 0 if the callers are right."""
        return self._faults

    def fault(self) -> None:
        """Count a call that came twice or too late."""
        self._faults += 1

    def take(self, worker: Worker, prefill_tokens: int, *, ends_at_first_token: bool = False) -> Guard:
        """Count one request with so many prompt tokens left to compute on `worker`; the guard gives it back."""
        held = Load(requests=1, waiting=1, prefill_tokens=prefill_tokens)
        self._loads[worker] = self.load(worker).plus(held)
        return Guard(self, worker, held, ends_at_first_token=ends_at_first_token)

    def load(self, worker: Worker) -> Load:
        """Return what runs on one incarnation, gone or not."""
        return self._loads.get(worker, IDLE)

    def loads(self) -> dict[Worker, Load]:
        """Return every incarnation, gone or not, on which something runs."""
        return dict(self._loads)

    def settle(self, worker: Worker, part: Load) -> None:
        """Take back a part of what a guard held; called by the guards alone."""
        left = self._loads[worker].minus(part)
        if left != IDLE:
            self._loads[worker] = left
            return
        del self._loads[worker]
        if self._on_idle is not None:
            self._on_idle(worker)
