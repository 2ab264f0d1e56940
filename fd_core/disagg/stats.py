"""Statistics of transfers."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fd_core.types.metrics import counter

_DROPPED: Final = "Transfer messages dropped as unauthenticated, malformed or too large."


class SideStats(msgspec.Struct, kw_only=True):
    """Counters of both sides."""

    dropped_frames: Annotated[int, counter("kv_transfer_dropped_frames", _DROPPED)] = 0
    late_messages: int = 0
    """Messages for leases that were over or unknown."""
    errors: dict[str, int] = {}
    """Failed calls by component: connector, cache."""


class ReceiverStats(SideStats, kw_only=True):
    """Counters of the decode side since its start, and current gauges."""

    open_leases: int = 0
    """Gauge: fetches that were not completed."""
    peers: int = 0
    """Gauge: prefill workers that this worker is connected to."""
    outcomes: dict[str, int] = {}
    """Completed fetches by `fd_core.effects.operations.Outcome`."""
    pieces: int = 0
    """Pieces verified and copied to the device."""
    bytes: Annotated[int, counter("kv_fetched_bytes", "KV bytes fetched from prefill workers.")] = 0
    seconds: Annotated[
        float,
        counter("kv_fetch_seconds", "Time from lease to last copy in seconds, summed over all fetches that succeeded."),
    ] = 0.0


class SenderStats(SideStats, kw_only=True):
    """Counters of the prefill side since its start, and current gauges."""

    open_leases: int = 0
    leases: int = 0
    refused: Annotated[
        dict[str, int],
        counter("kv_leases_refused", "Leases of decode workers that were refused, by reason.", label="reason"),
    ] = {}
    """By reason: malformed, terms (the two workers are incompatible), busy, connector, engine."""
    ended: Annotated[
        dict[str, int], counter("kv_leases_ended", "Leases of decode workers that ended, by cause.", label="how")
    ] = {}
    """Accepted leases by `fd_core.disagg.lease.End`."""
    pieces: int = 0
    """Pieces copied from the device and sent."""
    bytes: Annotated[int, counter("kv_sent_bytes", "KV bytes sent to decode workers.")] = 0
    seconds: float = 0.0
    """Time from opening to confirmation, of all leases that were confirmed."""
