"""Time that the calls of a day sleep, which is counted instead of waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from fd_core.testing.kit.processes import resource_snapshot

_LONGEST: Final = 0.0005
"""Seconds that a sleep of a call takes."""


class TimedCalls:
    """Calls in threads of users, and how long they sleep."""

    def __init__(self) -> None:
        self.count, self.slept, self._longest = 0, 0.0, 0.0
        self._threads = set[int]()
        self._held = list[int]()

    def figures(self) -> dict[str, float]:
        """Return the mean and the longest time of sleep, with an allowance of some milliseconds."""
        return {
            "seconds asleep in a call": 0.004 + self.slept / self.count,
            "longest sleep": 0.1 + self._longest,
            "descriptors, mappings and threads more than in the morning": 32 + max(self._held) - self._held[0],
        }

    def note_resources(self, in_use: int = 0) -> None:
        """Count what the process holds at the end of an hour, beyond what is in use."""
        self._held.append(sum(map(len, resource_snapshot()[:3])) - in_use)

    def run(self, pool: ThreadPoolExecutor, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Return the result of a call in the thread of a pool."""

        def counted() -> Any:
            self._threads.add(threading.get_ident())
            return call(*given, **named)

        self.count += 1
        before = self.slept
        try:
            return pool.submit(counted).result()
        finally:
            self._longest = max(self._longest, self.slept - before)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the sleep of calls."""
        sleep = time.sleep

        def noted(seconds: float) -> None:
            own = threading.get_ident() in self._threads
            self.slept += seconds * own
            sleep(min(seconds, _LONGEST) if own else seconds)

        with mock.patch("time.sleep", noted):
            yield
