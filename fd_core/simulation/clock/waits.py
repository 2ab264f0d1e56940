"""Breakdown of the time of one request, from the client's send to its end: every second has one reason.

The engine's own scheduler reports the time inside it (`fd_core.scheduling.phases`); the rest is recorded here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from fd_core.types import PHASE_NAMES, PHASE_TITLES

_AROUND: Final = ("network", "retry", "front", "step", "restart", "engine")
WAITS: Final = (*PHASE_NAMES, *_AROUND)
"""Reasons by number: phases of the scheduler first, `computing` the first of them, then those around the engine."""
NETWORK, RETRY, FRONT, STEP, RESTART, ENGINE = (WAITS.index(name) for name in _AROUND)
"""Messages on the network; attempts that failed; the front of a server, which receives requests one after the other;
the step in progress, after which an engine reads its messages; another engine in place of a dead one; an engine
whose scheduler does not report phases."""

WAIT_TITLES: Final = {
    **PHASE_TITLES,
    "network": "the network",
    "retry": "failed attempts",
    "front": "the server's front",
    "step": "the step in progress",
    "restart": "another engine",
    "engine": "the engine",
}


class WaitAccount:
    """Time of one request by reason as its client sees it, which reads later than engines report."""

    __slots__ = ("_ask", "_before", "_clock", "_first", "_last_phases", "_reason", "_seconds", "_sent", "_since")

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with the client's send; `clock` is not that of a worker, which may be wrong."""
        self._clock = clock
        self._sent = self._since = clock()
        self._reason = NETWORK
        self._seconds = [0.0] * len(WAITS)
        self._before: list[float] | None = None
        """Seconds by reason at the first token."""
        self._first = math.inf
        self._ask: Callable[[], tuple[float, ...] | None] | None = None
        self._last_phases: tuple[float, ...] | None = None

    def wait_for(self, reason: int) -> None:
        """Account for a wait outside engines from now on."""
        self._close(self._clock())
        self._ask, self._reason = None, reason

    def enter(self, ask: Callable[[], tuple[float, ...] | None]) -> None:
        """Record that an engine received the request; `ask` returns its `Engine.phases`."""
        self.wait_for(ENGINE)
        self._ask, self._last_phases = ask, None

    def begin_again(self) -> None:
        """Start a retry at another worker, before any token: all time so far counts as lost to retries."""
        self.wait_for(NETWORK)
        self._seconds = [0.0] * len(WAITS)
        self._seconds[RETRY] = self._since - self._sent

    def record(self, phases: tuple[float, ...] | None, at: float) -> None:
        """Record the phases as the client reads them at time `at`; None adds the elapsed time to the current reason."""
        elapsed = max(at - self._since, 0.0)
        if phases is None:
            self._seconds[self._reason] += elapsed
        else:
            previous = self._last_phases or (0.0,) * len(phases)
            for number, (seconds, before) in enumerate(zip(phases, previous, strict=True)):
                if seconds > before:
                    # Exclude phases that the engine reported but the client has not read yet.
                    spent = min(seconds - before, elapsed)
                    self._seconds[number] += spent
                    elapsed -= spent
            self._seconds[NETWORK] += elapsed
            self._last_phases = phases
        self._since = max(at, self._since)

    def first_token(self, at: float) -> None:
        """Record the time of the first token; waits after it are waits between tokens."""
        self._close(at)
        self._before, self._first = [*self._seconds], at

    def end(self) -> tuple[list[float], list[float]]:
        """Return the seconds by number of the reason, before and after the first token; they add up to all time."""
        now = self._clock()
        self._close(now)
        unread = self._since - now
        before = self._before if self._first <= now else None
        base = before or [0.0] * len(WAITS)
        seconds = self._seconds
        for number in (NETWORK, *range(len(WAITS))) if unread > 0 else ():
            cut = min(max(unread, 0.0), seconds[number] - base[number])
            seconds[number] -= cut
            unread -= cut
        if before is None:
            return seconds, base
        return before, [after - early for after, early in zip(seconds, before, strict=True)]

    def _close(self, at: float) -> None:
        """Add the time since the last change to its reason."""
        self.record(None if self._ask is None else self._ask(), at)
