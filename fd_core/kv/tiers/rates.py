"""Recent cost of loading, which the scheduler compares with the cost of computing."""

from __future__ import annotations

_SHARE = 0.25
"""Weight of a sample in the moving average."""
_RATE_MEMORY_SECONDS = 60.0


class Rate:
    """An exponentially weighted moving average of seconds per unit. Written by one thread, read by any.

    It is reset after a minute without a sample: a tier that seems slow is not used and so not measured, and one slow
    period must not disable it permanently.
    """

    def __init__(self) -> None:
        self._average: tuple[float, float] | None = None

    def add(self, seconds: float, units: int, now: float) -> None:
        """Count `units` that took `seconds` together, until `now`."""
        if units <= 0:
            return
        sample = seconds / units
        known = self.value(now)
        self._average = (sample if known is None else known + _SHARE * (sample - known), now)

    def value(self, now: float) -> float | None:
        """Return seconds per unit, None without a sample in the last minute."""
        average = self._average
        return None if average is None or now - average[1] > _RATE_MEMORY_SECONDS else average[0]
