"""A thread that polls while transfers are in progress, because NIXL moves bytes only when it is polled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

__all__ = ["Pump"]

_SHORTEST: Final = 50e-6
_LONGEST: Final = 1e-3
_GROWTH: Final = 1.2
"""Factor between one pause and the next, in seconds, while nothing happens."""


class Pump:
    """A thread that calls `poll` while `wanted()` is true, and sleeps otherwise until it is nudged."""

    def __init__(self, poll: Callable[[], bool], wanted: Callable[[], bool]) -> None:
        """`poll` returns whether something happened. Neither callable raises."""
        self._poll, self._wanted = poll, wanted
        self._nudged = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="fd-nixl", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Poll often again."""
        self._nudged.set()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping = True
        self._nudged.set()
        self._thread.join()

    def _run(self) -> None:
        pause = _SHORTEST
        while not self._stopping:
            happened = self._poll()
            pause = _SHORTEST if happened else min(pause * _GROWTH, _LONGEST)
            if self._nudged.wait(pause if self._wanted() else None):
                self._nudged.clear()
                pause = _SHORTEST
