"""The network between clients, routers and workers: a delay for everything that is sent, unless a fault keeps it."""

from __future__ import annotations

from collections.abc import Callable

from fd_core.simulation.clock.timeline import Timeline


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
