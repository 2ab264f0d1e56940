"""Timeout that does not count time during which both sides may be suspended together."""

from __future__ import annotations

import time
from typing import Final

_MOST_SECONDS: Final = 0.6
"""That count from one look to the next; looks are more frequent, unless this process stood still itself."""


class Patience:
    """Seconds for which somebody is waited for, by looks.

    The clock goes on while a machine, or all of its processes, are paused: that time is nobody's silence.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Begin again: there was a sign."""
        self._waited, self._last = 0.0, time.monotonic()

    def is_over(self) -> bool:
        """Look at the clock, and say whether it was waited for longer than that."""
        now = time.monotonic()
        self._waited, self._last = self._waited + min(now - self._last, _MOST_SECONDS), now
        return self._waited > self._seconds
