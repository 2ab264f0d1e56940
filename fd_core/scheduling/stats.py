"""The statistics of a scheduler: what its parts count, and what they hold at one moment."""

from __future__ import annotations

import msgspec

from fd_core.kv.blocks import BlockStats
from fd_core.scheduling.counters import SchedulerCounters
from fd_core.scheduling.drafts import DraftStats
from fd_core.scheduling.kv_offloading import OffloadCounters
from fd_core.scheduling.kv_transferring import TransferCounters
from fd_core.scheduling.load_or_recompute import Pace
from fd_core.scheduling.output_side import OutputCounters
from fd_core.scheduling.slots import SlotStats

__all__ = ["SchedulerStats"]


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters by owner; counters only grow within an epoch."""

    slots: SlotStats = SlotStats()
    counters: SchedulerCounters = msgspec.field(default_factory=SchedulerCounters)
    blocks: BlockStats = BlockStats()
    outputs: OutputCounters = msgspec.field(default_factory=OutputCounters)
    drafts: DraftStats = DraftStats()
    offload: OffloadCounters = msgspec.field(default_factory=OffloadCounters)
    pace: Pace | None = None
    """Measured costs of computing and loading; None if no KV is stored outside the device."""
    transfers: TransferCounters | None = None
    """KV that travels between workers; None for a worker that prefills and decodes."""
