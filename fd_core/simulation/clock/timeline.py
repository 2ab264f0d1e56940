"""The virtual clock, and what is to happen at which time: in one order, whatever the machine."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

__all__ = ["Appointment", "Timeline"]


class Appointment:
    """Something that happens at a time, unless it is called off before."""

    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        """In seconds of the virtual clock."""
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Call it off; nothing happens if it is over."""
        self.call = None

    def fall_due(self) -> None:
        """Keep it, now that its time has come and it was not called off."""
        call, self.call = self.call, None
        if call is not None:
            call()


class Timeline:
    """Appointments in order of time, and of their making where times are equal. Nothing but `run` moves the clock."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        """Seconds."""
        self.events = 0
        """Appointments that were kept."""
        self._queue: list[tuple[float, int, Appointment]] = []
        self._made = 0

    def clock(self) -> float:
        """Return the time in seconds, where a function is wanted."""
        return self.now

    def at(self, when: float, call: Callable[[], None]) -> Appointment:
        """Have `call` called at time `when`; at once, behind what is due now, if that is past."""
        appointment = Appointment(when if when > self.now else self.now, call)
        self.book(appointment.when, appointment)
        return appointment

    def book(self, when: float, appointment: Appointment) -> None:
        """Have an appointment fall due at time `when`; its own `when` may be by another clock."""
        heapq.heappush(self._queue, (when if when > self.now else self.now, self._made, appointment))
        self._made += 1

    @property
    def quiet(self) -> bool:
        """Whether nothing else is due now: who would be called now may as well go on at once."""
        return not self._queue or self._queue[0][0] > self.now

    def after(self, seconds: float, call: Callable[[], None]) -> Appointment:
        """Have `call` called in `seconds`."""
        return self.at(self.now + seconds, call)

    def run(self, until: float = math.inf) -> None:
        """Keep appointments up to time `until`, until none is left. An exception of one of them ends the run."""
        queue, take = self._queue, heapq.heappop
        while queue and queue[0][0] <= until:
            when, _, appointment = take(queue)
            if appointment.call is not None:
                self.now = when
                self.events += 1
                appointment.fall_due()
        if until < math.inf:
            self.now = max(self.now, until)
