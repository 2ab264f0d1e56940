"""Phase durations of each request: time in steps, and time waiting by wait reason.

    queued      slot, blocks, budget, scheduler: the reason that blocks the head of the queue blocks all after it
    parked      prefix, grammar, store: each request waits for its own event
    in a slot   store, transfer: its KV is in flight; blocks, budget: a step leaves it out; computing: it is in a step
    preempted   from the preemption until it holds a slot again

All queued requests change their wait reason at once, so the queue accumulates seconds by reason, and a request stores
their values when it joins: no plan visits every waiting request. The caller provides the clock; no decision depends on
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from fd_core.types import PHASE_NAMES, Phase
from fd_core.types.metrics import counter

_QUEUE_PHASES: Final = (Phase.SLOT, Phase.BLOCKS, Phase.BUDGET, Phase.SCHEDULER)
"""Wait reasons of queued requests."""


class PhaseCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of all requests by phase since the start; monotonic."""

    seconds: Annotated[
        dict[str, float],
        counter(
            "request_seconds",
            "Seconds that requests spent in each phase; a phase counts once it is over.",
            label="phase",
            values=PHASE_NAMES,
        ),
    ] = msgspec.field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class PhaseTimes:
    """Phase durations of one request."""

    seconds: list[float]
    """Seconds by the number of the phase, without the current phase."""
    phase: Phase | None = None
    """The current phase; None while queued, and before the request arrived."""
    since: float = 0.0
    """Time at which the current phase began."""
    joined: list[float] | None = None
    """Seconds of the queue by reason when the request joined it; None if it is not queued."""


class PhaseClock:
    """Measures phase durations of one scheduler's requests. Each operation takes O(1)."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        """`clock`: seconds; None turns measurement off."""
        self._enabled = clock is not None
        self._clock = clock or float
        self._queue_phase = Phase.SLOT
        self.queue_phase_set = False
        """True if the wait reason of the queue was set since this flag was last cleared."""
        self._queue_phase_since = self._clock()
        self._queue_seconds = [0.0] * len(Phase)
        self._totals = [0.0] * len(Phase)

    def set_queue_phase(self, phase: Phase) -> None:
        """Set the wait reason of all queued requests to `phase`."""
        self.queue_phase_set = True
        if phase is not self._queue_phase:
            now = self._clock()
            self._queue_seconds[self._queue_phase] += now - self._queue_phase_since
            self._queue_phase_since, self._queue_phase = now, phase

    def enter(self, times: PhaseTimes, phase: Phase | None) -> None:
        """Move a request to another phase; None: it is queued."""
        if phase is None or phase is not times.phase:
            self._settle(times)
            times.phase, times.joined = phase, None if phase is not None else [*self._queue_seconds]

    def current(self, times: PhaseTimes) -> Phase:
        """Return the current phase of a request; that of the queue while it is queued."""
        return self._queue_phase if times.phase is None else times.phase

    def durations(self, times: PhaseTimes) -> tuple[float, ...] | None:
        """Return the seconds of a request until now by the number of the phase; None without a clock."""
        if not self._enabled:
            return None
        self._settle(times)
        return tuple(times.seconds)

    def stats(self) -> PhaseCounters | None:
        """Return the seconds of all requests so far; None without a clock."""
        if not self._enabled:
            return None
        return PhaseCounters(seconds=dict(zip(PHASE_NAMES, self._totals, strict=True)))

    def _settle(self, times: PhaseTimes) -> None:
        """Add the time of the current phase until now to the total."""
        now, queued = self._clock(), self._queue_seconds
        queued[self._queue_phase] += now - self._queue_phase_since
        self._queue_phase_since = now
        if (joined := times.joined) is not None:
            for phase in _QUEUE_PHASES:
                seconds = queued[phase] - joined[phase]
                times.seconds[phase] += seconds
                self._totals[phase] += seconds
            times.joined = [*queued]
        elif times.phase is not None:
            times.seconds[times.phase] += now - times.since
            self._totals[times.phase] += now - times.since
        times.since = now
