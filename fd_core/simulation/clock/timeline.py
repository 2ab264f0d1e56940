"""The virtual clock and its event queue: one deterministic order of events on every machine."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class ScheduledEvent:
    """An event scheduled for a time, unless it is cancelled before."""

    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        """In seconds of the virtual clock."""
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Cancel the event; a no-op if it is over."""
        self.call = None

    def fire(self) -> None:
        """Run the event, which is due and not cancelled."""
        call, self.call = self.call, None
        if call is not None:
            call()


class Timeline:
    """Events in order of time, then of creation. Only `run` advances the clock."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        """Seconds."""
        self.events = 0
        self._queue: list[tuple[float, int, ScheduledEvent]] = []
        self._made = 0

    def clock(self) -> float:
        """Return the time in seconds; for interfaces that take a clock function."""
        return self.now

    def at(self, when: float, call: Callable[[], None]) -> ScheduledEvent:
        """Schedule `call` for time `when`; if that is past, for now, after the events that are already due."""
        event = ScheduledEvent(when if when > self.now else self.now, call)
        self.schedule(event.when, event)
        return event

    def schedule(self, when: float, event: ScheduledEvent) -> None:
        """Schedule an event for time `when`; its own `when` may be in the time of another clock."""
        heapq.heappush(self._queue, (when if when > self.now else self.now, self._made, event))
        self._made += 1

    @property
    def quiet(self) -> bool:
        """Return True if no other event is due now, so that a callback may run at once instead of being scheduled."""
        return not self._queue or self._queue[0][0] > self.now

    def after(self, seconds: float, call: Callable[[], None]) -> ScheduledEvent:
        """Schedule `call` in `seconds`."""
        return self.at(self.now + seconds, call)

    def run(self, until: float = math.inf) -> None:
        """Run events up to time `until`, until none is left. An exception of an event ends the run."""
        queue, take = self._queue, heapq.heappop
        while queue and queue[0][0] <= until:
            when, _, event = take(queue)
            if event.call is not None:
                self.now = when
                self.events += 1
                event.fire()
        if until < math.inf:
            self.now = max(self.now, until)


class _LocalEvent(ScheduledEvent):
    """An event on the clock of one process; it is delayed if the process is frozen when it is due."""

    __slots__ = ("_process",)

    def __init__(self, when: float, call: Callable[[], None], process: LocalTimeline) -> None:
        super().__init__(when, call)
        self._process = process

    def fire(self) -> None:
        """Run the event, or reschedule it for the end of the freeze."""
        if self._process.keeps(self):
            super().fire()


class LocalTimeline(Timeline):
    """The shared timeline as one process sees it. Events of a frozen process are delayed."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._shared = timeline
        self._rate = 1.0
        self._offset = 0.0
        self._latest = 0.0
        self._right = True
        """True if the clock was never set: it shows the shared time."""
        self._frozen_until = 0.0

    @property
    def now(self) -> float:
        """Time in seconds by the clock of this process; monotonic."""
        if self._right:
            return self._shared.now
        self._latest = max(self._latest, self._offset + self._rate * self._shared.now)
        return self._latest

    @now.setter
    def now(self, value: float) -> None:
        self._latest = value

    @property
    def frozen(self) -> bool:
        """True if the process is frozen."""
        return self._shared.now < self._frozen_until

    def set_clock(self, offset: float, drift: float) -> None:
        """Advance the clock by `offset` seconds from now on, and run it faster by the share `drift`."""
        self._latest = self.now
        now = self._latest + max(0.0, offset)
        self._right = False
        self._rate = 1.0 + drift
        self._offset = now - self._rate * self._shared.now

    def freeze(self, seconds: float) -> None:
        """Freeze the process for `seconds` of the shared time."""
        self._frozen_until = max(self._frozen_until, self._shared.now + seconds)

    def at(self, when: float, call: Callable[[], None]) -> ScheduledEvent:
        """Schedule `call` for the time `when` of this clock, or for the end of a freeze."""
        now = self.now
        promise = _LocalEvent(when if when > now else now, call, self)
        self._shared.schedule((promise.when - self._offset) / self._rate, promise)
        return promise

    def keeps(self, promise: _LocalEvent) -> bool:
        """Return True if a due event runs now; otherwise reschedule it for the end of the freeze."""
        if self._frozen_until and self.frozen:
            self._shared.schedule(self._frozen_until, promise)
            return False
        if not self._right:
            self._latest = max(self._latest, promise.when)
        return True

    @property
    def quiet(self) -> bool:
        """Return True if no event is due now and the clock shows the shared time."""
        return self._right and not self._frozen_until and self._shared.quiet

    def run(self, until: float = math.inf) -> None:
        """Raise: time advances for all processes together."""
        raise RuntimeError("the clock of one process cannot run separately")


class Network:
    """Delays between named endpoints. Messages between two endpoints arrive in order and exactly once, as over TCP.

    Between partitioned endpoints they are held until the partition heals; the sender may time out before.
    """

    def __init__(self, timeline: Timeline, latency: float) -> None:
        """`latency`: one-way delay between two endpoints, in seconds."""
        self.latency = latency
        self.held = 0
        """Number of messages that were held by a partition."""
        self.healthy = True
        """True if no link was ever partitioned or slowed down, so that every link is clear."""
        self._timeline = timeline
        self._waiting: dict[frozenset[str], list[tuple[str, Callable[[], None]]]] = {}
        """Messages held by each partition, with their senders."""
        self._slow: dict[frozenset[str], float] = {}
        self._clear: dict[tuple[str, str], float] = {}
        """Arrival time of the last message that was sent while its link was slow or partitioned."""

    def part(self, one: str, other: str) -> None:
        """Partition two endpoints."""
        self.healthy = False
        self._waiting.setdefault(frozenset((one, other)), [])

    def join(self, one: str, other: str) -> None:
        """Heal a partition; held messages are delivered first."""
        pair = frozenset((one, other))
        for sender, arrive in self._waiting.pop(pair, ()):
            (receiver,) = pair - {sender}
            self._send_late(sender, receiver, arrive)

    def slow(self, one: str, other: str, seconds: float) -> None:
        """Add `seconds` to the delay between two endpoints; 0 restores the usual delay."""
        if seconds > 0:
            self.healthy = False
            self._slow[frozenset((one, other))] = seconds
        else:
            self._slow.pop(frozenset((one, other)), None)

    def delay(self, one: str, other: str) -> float:
        """Return the additional delay between two endpoints that are not partitioned, in seconds."""
        return self._slow.get(frozenset((one, other)), 0.0) if self._slow else 0.0

    def reaches(self, one: str, other: str) -> bool:
        """Return True if two endpoints are not partitioned."""
        return not self._waiting or frozenset((one, other)) not in self._waiting

    def clear(self, one: str, other: str) -> bool:
        """Return True if a message sent now takes no longer than usual."""
        if self.healthy or not (self._waiting or self._slow or self._clear):
            return True
        slow = frozenset((one, other)) in self._slow
        return not slow and self.reaches(one, other) and self._clear.get((one, other), 0.0) <= self._timeline.now

    def send(self, one: str, other: str, arrive: Callable[[], None]) -> None:
        """Call `arrive` at the other end when the message arrives."""
        if self.healthy or self.clear(one, other):
            self._timeline.after(self.latency, arrive)
        elif not self.reaches(one, other):
            self.held += 1
            self._waiting[frozenset((one, other))].append((one, arrive))
        else:
            self._send_late(one, other, arrive)

    def _send_late(self, one: str, other: str, arrive: Callable[[], None]) -> None:
        """Send a message that later messages must not overtake."""
        due = self._timeline.now + self.latency + self._slow.get(frozenset((one, other)), 0.0)
        self._clear[one, other] = max(due, self._clear.get((one, other), 0.0))
        self._timeline.at(self._clear[one, other], arrive)
