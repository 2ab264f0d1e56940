"""Timeout that does not count time while this process is suspended."""

from __future__ import annotations

import time
from typing import Final

_MOST_SECONDS: Final = 0.6
"""Maximum time counted between two polls; polls are more frequent unless this process was suspended."""


class PolledTimeout:
    """Timeout of a peer in seconds, checked by polling.

    The clock continues while a machine or all of its processes are paused, which must not count as silence of the peer.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Restart the timeout after a sign of life."""
        self._waited, self._last = 0.0, time.monotonic()

    def expired(self) -> bool:
        """Poll the clock; return True if the timeout has expired."""
        now = time.monotonic()
        self._waited, self._last = self._waited + min(now - self._last, _MOST_SECONDS), now
        return self._waited > self._seconds
