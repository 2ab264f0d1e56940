"""A load on its way from host tier and store to the device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from fd_core.kv.effects import Load, Loaded
from fd_core.kv.tiers.host import HostArray

__all__ = ["LoadJob"]


@dataclass(slots=True, eq=False)
class LoadJob:
    """How far a load came. The thread that copies owns all of it but `missing`, which the thread that reads owns."""

    effect: Load
    began: float
    arrays: list[HostArray | None]
    """By index of their key: the blocks on the host that are still to be copied, None for those on their way."""
    end: int
    """Blocks that may still be loaded: the prefix ends before the first that is missing, damaged or not copied."""
    answer: Loaded
    """The completion, if the load were to end here."""
    missing: deque[int] = field(default_factory=deque)
    """Indices of the keys that are still to be fetched from the store, ascending."""
    fetched: set[int] = field(default_factory=set)
    """Indices of the keys whose blocks came from the store."""
