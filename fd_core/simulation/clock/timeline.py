"""The virtual clock, and what is to happen at which time: in one order, whatever the machine."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


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


class _LocalAppointment(Appointment):
    """An appointment by the clock of a process; it is kept late if the process stands still when it falls due."""

    __slots__ = ("_process",)

    def __init__(self, when: float, call: Callable[[], None], process: LocalTimeline) -> None:
        super().__init__(when, call)
        self._process = process

    def fall_due(self) -> None:
        """Keep it, or book it again for the end of the standstill."""
        if self._process.keeps(self):
            super().fall_due()


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

    def run(self, until: float = math.inf) -> None:
        """Refuse: time passes for all at once."""
        raise RuntimeError("the time of one process does not run by itself")


class Network:
    """Delays between named places. What is sent between two places arrives in order and once, as over TCP.

    Between places that are parted it waits until they are joined; who sent it may give up before.
    """

    def __init__(self, timeline: Timeline, latency: float) -> None:
        """`latency`: seconds on the way from one place to another."""
        self.latency = latency
        self.held = 0
        """Messages that had to wait until places were joined."""
        self.healthy = True
        """Whether nothing was ever parted or slowed down, so that everything is clear."""
        self._timeline = timeline
        self._waiting: dict[frozenset[str], list[tuple[str, Callable[[], None]]]] = {}
        """What waits between the places that are parted, and whose it is."""
        self._slow: dict[frozenset[str], float] = {}
        self._clear: dict[tuple[str, str], float] = {}
        """When the last message arrives that was sent while its way was slow or parted."""

    def part(self, one: str, other: str) -> None:
        """Let nothing through between two places."""
        self.healthy = False
        self._waiting.setdefault(frozenset((one, other)), [])

    def join(self, one: str, other: str) -> None:
        """Let everything through again, what waited first."""
        pair = frozenset((one, other))
        for sender, arrive in self._waiting.pop(pair, ()):
            (receiver,) = pair - {sender}
            self._send_late(sender, receiver, arrive)

    def slow(self, one: str, other: str, seconds: float) -> None:
        """Delay what is sent between two places by so much more; 0 ends it."""
        if seconds > 0:
            self.healthy = False
            self._slow[frozenset((one, other))] = seconds
        else:
            self._slow.pop(frozenset((one, other)), None)

    def delay(self, one: str, other: str) -> float:
        """Return how much longer than usual something takes between two places that are not parted, in seconds."""
        return self._slow.get(frozenset((one, other)), 0.0) if self._slow else 0.0

    def reaches(self, one: str, other: str) -> bool:
        """Whether two places are not parted."""
        return not self._waiting or frozenset((one, other)) not in self._waiting

    def clear(self, one: str, other: str) -> bool:
        """Whether something that is sent now takes no longer than usual."""
        if self.healthy or not (self._waiting or self._slow or self._clear):
            return True
        slow = frozenset((one, other)) in self._slow
        return not slow and self.reaches(one, other) and self._clear.get((one, other), 0.0) <= self._timeline.now

    def send(self, one: str, other: str, arrive: Callable[[], None]) -> None:
        """Have `arrive` called at the other end, once it can be."""
        if self.healthy or self.clear(one, other):
            self._timeline.after(self.latency, arrive)
        elif not self.reaches(one, other):
            self.held += 1
            self._waiting[frozenset((one, other))].append((one, arrive))
        else:
            self._send_late(one, other, arrive)

    def _send_late(self, one: str, other: str, arrive: Callable[[], None]) -> None:
        """Send what nothing may overtake that is sent afterwards."""
        due = self._timeline.now + self.latency + self._slow.get(frozenset((one, other)), 0.0)
        self._clear[one, other] = max(due, self._clear.get((one, other), 0.0))
        self._timeline.at(self._clear[one, other], arrive)
