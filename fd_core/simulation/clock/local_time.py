"""The time of one process: a clock that may be wrong, and a process that may stand still."""

from __future__ import annotations

from collections.abc import Callable

from fd_core.simulation.clock.timeline import Appointment, Timeline

__all__ = ["LocalTimeline"]


class _LocalAppointment(Appointment):
    """An appointment by the clock of a process; it is kept late if the process stands still when it falls due."""

    __slots__ = ("_process",)

    def __init__(self, when: float, call: Callable[[], None], process: LocalTimeline) -> None:
        super().__init__(when, call)
        self._process = process

    def fall_due(self) -> None:
        """Keep it, or book it again for the end of the standstill."""
        if not self._process.keeps(self):
            return
        call, self.call = self.call, None
        if call is not None:
            call()


class LocalTimeline(Timeline):
    """The shared timeline as one process sees it. A process that stands still keeps its appointments late."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._shared = timeline
        self._rate = 1.0
        self._offset = 0.0
        self._latest = 0.0
        self._right = True
        """Whether the clock was never set: it shows the shared time."""
        self._frozen_until = 0.0

    @property
    def now(self) -> float:
        """Seconds, by the clock of this process; never less than before."""
        if self._right:
            return self._shared.now
        self._latest = max(self._latest, self._offset + self._rate * self._shared.now)
        return self._latest

    @now.setter
    def now(self, value: float) -> None:
        self._latest = value

    @property
    def frozen(self) -> bool:
        """Whether the process stands still."""
        return self._shared.now < self._frozen_until

    def set_clock(self, offset: float, drift: float) -> None:
        """Let the clock show `offset` seconds more from now on, and run faster by the share `drift`."""
        self._latest = self.now
        now = self._latest + max(0.0, offset)
        self._right = False
        self._rate = 1.0 + drift
        self._offset = now - self._rate * self._shared.now

    def freeze(self, seconds: float) -> None:
        """Let the process do nothing for so long, by everybody else's clock."""
        self._frozen_until = max(self._frozen_until, self._shared.now + seconds)

    def at(self, when: float, call: Callable[[], None]) -> Appointment:
        """Have `call` called when the clock shows `when`, or once the process goes on."""
        now = self.now
        promise = _LocalAppointment(when if when > now else now, call, self)
        self._shared.book((promise.when - self._offset) / self._rate, promise)
        return promise

    def keeps(self, promise: _LocalAppointment) -> bool:
        """Whether an appointment that falls due is kept now; else it is booked for the end of the standstill."""
        if self._frozen_until and self.frozen:
            self._shared.book(self._frozen_until, promise)
            return False
        if not self._right:
            self._latest = max(self._latest, promise.when)
        return True

    @property
    def quiet(self) -> bool:
        """Whether nothing is due now, and the clock is that of everybody else."""
        return self._right and not self._frozen_until and self._shared.quiet

    def run(self, until: float = float("inf")) -> None:
        """Refuse: time passes for all at once."""
        raise RuntimeError("the time of one process does not run by itself")
