"""Prompts that decode workers want computed, on their way from the sender's thread to the engine's."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fd_core.types import PrefillJob

__all__ = ["Orders"]


class Orders:
    """Orders that the engine was not told of, and leases that are over before their request.

    An order whose lease ends before it was collected is forgotten; otherwise the engine is told of the end.
    """

    def __init__(self) -> None:
        self.on_order: Callable[[], None] = lambda: None
        """Called on the sender's thread whenever there is something to collect."""
        self._lock = threading.Lock()
        self._waiting: dict[str, PrefillJob] = {}
        self._over: list[str] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, job: PrefillJob) -> None:
        """Have the engine compute a prompt."""
        with self._lock:
            self._waiting[job.lease] = job
        self.on_order()

    def over(self, lease: str, *, abort: bool) -> None:
        """Learn that a lease ended; `abort` if the engine need not go on with its request."""
        with self._lock:
            if self._waiting.pop(lease, None) is not None or not abort:
                return
            self._over.append(lease)
        self.on_order()

    def collect(self) -> list[PrefillJob]:
        """Return the orders since the last call."""
        if not self._waiting:
            return []
        with self._lock:
            orders = list(self._waiting.values())
            self._waiting.clear()
        return orders

    def collect_over(self) -> list[str]:
        """Return the leases that ended since the last call."""
        if not self._over:
            return []
        with self._lock:
            over, self._over = self._over, []
        return over
