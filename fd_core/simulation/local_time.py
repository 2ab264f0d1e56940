"""The time of one process: a clock that may be wrong, and a process that may stand still."""

from __future__ import annotations

from collections.abc import Callable

from fd_core.simulation.timeline import Appointment, Timeline

__all__ = ["LocalTimeline"]


class LocalTimeline(Timeline):
    """The shared timeline as one process sees it. A process that stands still keeps its appointments late."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._shared = timeline
        self._rate = 1.0
        self._offset = 0.0
        self._latest = 0.0
        self._frozen_until = 0.0

    @property
    def now(self) -> float:
        """Seconds, by the clock of this process; never less than before."""
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
        now = self.now + max(0.0, offset)
        self._rate = 1.0 + drift
        self._offset = now - self._rate * self._shared.now

    def freeze(self, seconds: float) -> None:
        """Let the process do nothing for so long, by everybody else's clock."""
        self._frozen_until = max(self._frozen_until, self._shared.now + seconds)

    def at(self, when: float, call: Callable[[], None]) -> Appointment:
        """Have `call` called when the clock shows `when`, or once the process goes on."""
        promise = Appointment(max(when, self.now), call)

        def fall_due() -> None:
            if promise.call is None:
                return
            if self.frozen:
                self._shared.at(self._frozen_until, fall_due)
                return
            self._latest = max(self._latest, promise.when)
            kept, promise.call = promise.call, None
            kept()

        self._shared.at((promise.when - self._offset) / self._rate, fall_due)
        return promise

    def run(self, until: float = float("inf")) -> None:
        """Refuse: time passes for all at once."""
        raise RuntimeError("the time of one process does not run by itself")
