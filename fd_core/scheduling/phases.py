"""Where the time of each request goes: into steps, or into a wait for one of several reasons.

    in line     slot, blocks, budget, scheduler: what keeps out the first in line keeps out everyone behind it
    parked      prefix, grammar, store: each request waits for its own event
    in a slot   store, transfer: its KV is on its way; blocks, budget: a step leaves it out; computing: it is in a step
    preempted   from its revocation until it holds a slot again

All in line change their reason at once, so the line keeps seconds by reason, and a request keeps what they were when it
joined: no plan looks at everyone who waits. Time is told by whoever owns the scheduler, and decides nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from fd_core.types import PHASE_NAMES, Phase
from fd_core.types.metrics import counter

_LINE: Final = (Phase.SLOT, Phase.BLOCKS, Phase.BUDGET, Phase.SCHEDULER)
"""What those in line may wait for."""


class PhaseCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of requests went since the start; only grows."""

    seconds: Annotated[
        dict[str, float],
        counter(
            "request_seconds",
            "Seconds that requests spent, by what they did or waited for; a phase counts once it is over.",
            label="phase",
            values=PHASE_NAMES,
        ),
    ] = msgspec.field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class PhaseTimes:
    """Where the time of one request went."""

    seconds: list[float]
    """By the number of the phase, without the phase that goes on."""
    phase: Phase | None = None
    """The phase that goes on; None in line, and before the request came."""
    since: float = 0.0
    """When it began."""
    joined: list[float] | None = None
    """What the line's seconds were when the request joined it; None out of line."""


class PhaseClock:
    """Tells the phases of one scheduler's requests apart. Each operation takes O(1)."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        """`clock`: seconds; None tells nothing."""
        self._tells = clock is not None
        self._clock = clock or float
        self._line = Phase.SLOT
        self.looked_at = False
        """Whether it was said, since this was set to false, what the line waits for."""
        self._line_since = self._clock()
        self._line_seconds = [0.0] * len(Phase)
        self._totals = [0.0] * len(Phase)

    def line_waits_for(self, phase: Phase) -> None:
        """Everyone in line waits for `phase` from now on."""
        self.looked_at = True
        if phase is not self._line:
            now = self._clock()
            self._line_seconds[self._line] += now - self._line_since
            self._line_since, self._line = now, phase

    def enter(self, times: PhaseTimes, phase: Phase | None) -> None:
        """A request does or waits for something else from now on; None: it stands in line."""
        if phase is None or phase is not times.phase:
            self._settle(times)
            times.phase, times.joined = phase, None if phase is not None else [*self._line_seconds]

    def told(self, times: PhaseTimes) -> tuple[float, ...] | None:
        """Return all seconds of a request until now by the number of the phase; None without a clock."""
        if not self._tells:
            return None
        self._settle(times)
        return tuple(times.seconds)

    def stats(self) -> PhaseCounters | None:
        """Return the seconds of all requests so far; None without a clock."""
        if not self._tells:
            return None
        return PhaseCounters(seconds=dict(zip(PHASE_NAMES, self._totals, strict=True)))

    def _settle(self, times: PhaseTimes) -> None:
        """Add what went on until now to what is over."""
        now, line = self._clock(), self._line_seconds
        line[self._line] += now - self._line_since
        self._line_since = now
        if (joined := times.joined) is not None:
            for phase in _LINE:
                seconds = line[phase] - joined[phase]
                times.seconds[phase] += seconds
                self._totals[phase] += seconds
            times.joined = [*line]
        elif times.phase is not None:
            times.seconds[times.phase] += now - times.since
            self._totals[times.phase] += now - times.since
        times.since = now
