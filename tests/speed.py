"""Current speed of this machine, relative to the one for which the limits of tests are written."""

from __future__ import annotations

import time
from typing import Final

USUAL: Final = 0.012
"""Seconds of a usual machine for the reference: a sum of a million numbers in Python."""


def slowdown() -> float:
    """Return the current slowdown of this machine against the usual one, at least 1."""
    begun = time.thread_time()
    sum(range(1_000_000))
    return max(1.0, (time.thread_time() - begun) / USUAL)
