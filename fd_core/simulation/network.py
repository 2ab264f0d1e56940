"""The network between clients, routers and workers: a delay for everything that is sent, unless a fault keeps it."""

from __future__ import annotations

from collections.abc import Callable

from fd_core.simulation.timeline import Timeline

__all__ = ["Network"]


class Network:
    """Delays between named places; a pair of places that is parted gets nothing through."""

    def __init__(self, timeline: Timeline, latency: float) -> None:
        """`latency`: seconds on the way from one place to another."""
        self.latency = latency
        self.lost = 0
        """Messages that did not arrive."""
        self._timeline = timeline
        self._parted: set[frozenset[str]] = set()
        self._slow: dict[frozenset[str], float] = {}

    def part(self, one: str, other: str) -> None:
        """Let nothing through between two places."""
        self._parted.add(frozenset((one, other)))

    def join(self, one: str, other: str) -> None:
        """Let everything through again."""
        self._parted.discard(frozenset((one, other)))

    def slow(self, one: str, other: str, seconds: float) -> None:
        """Delay what is sent between two places by so much more; 0 ends it."""
        if seconds > 0:
            self._slow[frozenset((one, other))] = seconds
        else:
            self._slow.pop(frozenset((one, other)), None)

    def reaches(self, one: str, other: str) -> bool:
        """Whether something that is sent now arrives."""
        return not self._parted or frozenset((one, other)) not in self._parted

    def delay(self, one: str, other: str) -> float:
        """Seconds that something takes which is sent now."""
        return self.latency + (self._slow.get(frozenset((one, other)), 0.0) if self._slow else 0.0)

    def send(self, one: str, other: str, arrive: Callable[[], None]) -> bool:
        """Have `arrive` called at the other end; return whether it will be."""
        if not self.reaches(one, other):
            self.lost += 1
            return False
        self._timeline.after(self.delay(one, other), arrive)
        return True
