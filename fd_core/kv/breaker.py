"""A circuit breaker: after a failure the dependency is not called for a while, then one call probes it again."""

from __future__ import annotations

from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """Decides if a call may be made. Pure: the clock's reading, in seconds, is passed in.

    It opens at the first severe failure or after `max_failures` others in a row, for `first` seconds, and twice as
    long, up to `longest`, each time the probing call fails again.
    """

    def __init__(self, *, first: float = 1.0, longest: float = 30.0, max_failures: int = 3) -> None:
        self.state: BreakerState = "closed"
        self._first = first
        self._longest = longest
        self._max_failures = max_failures
        self._pause = first
        self.until = 0.0
        """Time from which an open breaker admits a probing call."""
        self._failures = 0

    def ready(self, now: float) -> bool:
        """Return True if `admit` would admit a call."""
        return self.state == "closed" or (self.state == "open" and now >= self.until)

    def admit(self, now: float) -> bool:
        """Request a call. A caller that is admitted reports `success` or `failure` once."""
        if not self.ready(now):
            return False
        if self.state == "open":
            self.state = "half_open"
        return True

    def success(self) -> None:
        """Report a successful call; ignored if it was admitted before the breaker opened."""
        if self.state == "half_open":
            self.state = "closed"
        if self.state == "closed" and self._failures:
            self._failures = 0
            self._pause = self._first

    def failure(self, now: float, *, severe: bool) -> bool:
        """Report a failed call; return True if that opened the breaker."""
        if self.state == "open":
            return False
        self._failures += 1
        if self.state == "half_open":
            self._pause = min(2 * self._pause, self._longest)
        elif not severe and self._failures < self._max_failures:
            return False
        self.state = "open"
        self.until = now + self._pause
        return True

    def remaining(self, now: float) -> float:
        """Seconds until the next call may be made."""
        return max(0.0, self.until - now) if self.state == "open" else 0.0
