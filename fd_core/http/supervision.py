"""Supervision of background tasks: a failure is logged, counted and shown in health, and the task restarts."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, Final

import msgspec

from fd_core.errors import FdError
from fd_core.http.errors import ApiError
from fd_core.types.metrics import counter

log = logging.getLogger(__name__)

_FIRST_SECONDS: Final = 0.5
_MAX_SECONDS: Final = 30.0
"""Bounds of the backoff before a failed task restarts; it doubles with each failure in a row."""


class TaskStats(msgspec.Struct):
    """Failures of background tasks."""

    failures: Annotated[
        dict[str, int], counter("background_failures", "Failures of background tasks, by task.", label="task")
    ] = msgspec.field(default_factory=dict)


class Supervisor:
    """Owner of the background tasks of one event loop."""

    def __init__(self) -> None:
        self.stats = TaskStats()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failing: dict[tuple[str, str], str] = {}
        """Reason of the last failure, by name and part, until the task recovers."""

    @property
    def failing(self) -> str:
        """Describe the tasks that failed and have not recovered, for health; empty if there are none."""
        return "; ".join(sorted({f"background task {name}: {why}" for (name, _), why in self._failing.items()}))

    def start(
        self, name: str, work: Callable[[], Awaitable[object]], *, part: str = "", repeat: bool = True
    ) -> asyncio.Task[None]:
        """Run `work`, with `repeat` again after a failure, with backoff; `part` distinguishes tasks of one name."""
        self.stats.failures.setdefault(name, 0)
        task = asyncio.create_task(self._supervise(name, work, part, repeat=repeat), name=f"fdcore-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def keep(self, name: str, parts: Collection[str]) -> None:
        """Forget failures of all other parts of a task, which no longer exist."""
        for place in [place for place in self._failing if place[0] == name and place[1] and place[1] not in parts]:
            del self._failing[place]

    async def close(self) -> None:
        """Cancel every task and wait for its end."""
        await cancelled(*self._tasks)

    async def _supervise(self, name: str, work: Callable[[], Awaitable[object]], part: str, repeat: bool) -> None:
        loop, pause, place = asyncio.get_running_loop(), _FIRST_SECONDS, (name, part)
        try:
            while True:
                recovers = loop.time() + 2 * pause
                recovery = loop.call_at(recovers, self._failing.pop, place, None) if repeat else None
                try:
                    await work()
                    self._failing.pop(place, None)
                    return
                except Exception as error:  # noqa: BLE001  # supervision: no failure may end a task silently
                    if loop.time() >= recovers:
                        pause = _FIRST_SECONDS
                    self.stats.failures[name] += 1
                    self._failing[place] = reason = failure_reason(error)
                    # Without the text of unexpected errors: it may quote a prompt.
                    places = ""
                    if not isinstance(error, FdError | ApiError | OSError):
                        places = "; traceback without text:\n" + "".join(traceback.format_tb(error.__traceback__))
                    after = f"; it restarts in {pause:g} s" if repeat else ""
                    log.error("background task %s failed: %s%s%s", name, reason, after, places)
                finally:
                    if recovery is not None:
                        recovery.cancel()
                if not repeat:
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_SECONDS)
        finally:
            if repeat:
                self._failing.pop(place, None)


async def cancelled(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def failure_reason(error: Exception) -> str:
    """Return one line about a failure that names no path and quotes no request."""
    if isinstance(error, ApiError):
        return error.message
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error) if isinstance(error, FdError) else type(error).__name__
