"""What the tiers did, in numbers."""

from __future__ import annotations

import threading
from collections import Counter

import msgspec

from fd_core.breaker import BreakerState

__all__ = ["TierCounters", "TierStats"]


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """TierCounters since the start, and gauges of this moment."""

    host_blocks: int = 0
    """Gauge."""
    host_bytes: int = 0
    """Gauge."""
    host_limit_bytes: int = 0
    pending_write_bytes: int = 0
    """Gauge: blocks that wait for the store, those of the call in progress included."""
    open_operations: int = 0
    """Gauge: operations whose completion was not produced."""
    lookups: int = 0
    lookups_expired: int = 0
    host_hit_blocks: int = 0
    """Leading blocks that lookups found in the host tier."""
    store_hit_blocks: int = 0
    """Blocks that lookups found behind those, in host tier and store together."""
    loads: int = 0
    load_expired: int = 0
    loaded_blocks_host: int = 0
    loaded_blocks_store: int = 0
    saves: int = 0
    saves_expired: int = 0
    saved_blocks: int = 0
    """Blocks copied from the device."""
    copy_errors: int = 0
    """Copies from or to the device that failed."""
    written_blocks: int = 0
    dropped_blocks: int = 0
    """Blocks that should have been written but were not: queue full, breaker open, store failed, shutdown."""
    damaged: dict[str, int] = {}
    """Stored values that were refused, by reason."""
    store_errors: dict[str, int] = {}
    """Failed calls by trouble."""
    breaker: BreakerState = "closed"
    """Of lookups and loads."""
    write_breaker: BreakerState = "closed"
    store: str | None = None
    """The store's location without secrets."""


class TierCounters:
    """The counters behind `TierStats`; any thread adds, under a lock that is held for one addition."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._damaged: Counter[str] = Counter()
        self._troubles: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Add to the counter that `TierStats` calls `name`."""
        with self._lock:
            self._counts[name] += count

    def add_damaged(self, reason: str) -> None:
        """Count a value that was refused."""
        with self._lock:
            self._damaged[reason] += 1

    def add_trouble(self, trouble: str) -> None:
        """Count a failed call of the store."""
        with self._lock:
            self._troubles[trouble] += 1

    def snapshot(self) -> TierStats:
        """Return the counters; gauges are left at their defaults."""
        with self._lock:
            return TierStats(**self._counts, damaged=dict(self._damaged), store_errors=dict(self._troubles))  # type: ignore[arg-type]  # names are TierStats fields
