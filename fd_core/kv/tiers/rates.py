"""What loading has cost lately, so that the scheduler can compare it with computing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoadRates", "Rate"]

_SHARE = 0.25
"""Weight of a sample in the moving average."""
_FORGET_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LoadRates:
    """Measured cost of loading in seconds; None where nothing was measured lately."""

    host_block: float | None
    """One block from the host tier."""
    store_block: float | None
    """One block from the store, fetched and checked; its copy to the device overlaps with the next fetch."""
    store_latency: float | None
    """One question to the store."""

    def seconds(self, host: int, store: int) -> float:
        """Expected time to load so many blocks from each; what is unknown is taken to be free, so that it is tried."""
        seconds = host * (self.host_block or 0.0)
        if store:
            per_block = max(self.store_block or 0.0, self.host_block or 0.0)
            seconds += (self.store_latency or 0.0) + store * per_block
        return seconds


class Rate:
    """An exponentially weighted moving average of seconds per unit. Written by one thread, read by any.

    It is forgotten after a minute without a sample: nobody measures what nobody dares to use, and one bad spell must
    not rule a tier out for ever.
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
        """Return seconds per unit."""
        average = self._average
        return None if average is None or now - average[1] > _FORGET_SECONDS else average[0]
