"""What does the jobs behind a port: one after the other, while whoever posted them goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Job", "JobLoop", "MakeLoop"]

Job = Callable[[], object]


class JobLoop(Protocol):
    """Jobs in the order of their posting, none beside another. `ThreadLoop` does them on a thread."""

    def start(self) -> None:
        """Begin; jobs that were posted before are done first."""

    def post(self, job: Job) -> bool:
        """Have `job` done after all that were posted before; False if it never will be. Never waits."""

    def stop(self) -> None:
        """End after the jobs that were posted before."""

    def join(self, seconds: float) -> bool:
        """Wait for the end; return whether it came within `seconds`."""


class MakeLoop(Protocol):
    """Makes a loop that was not started."""

    def __call__(self, name: str, turn: Callable[[], float] = ..., end: Job = ..., /) -> JobLoop:
        """`turn` is called after each round of jobs and returns after how many seconds it is to be called again.

        `end` is called once after the last turn.
        """
