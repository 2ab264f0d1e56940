"""What a scheduler holds at one moment, as a value for statistics and traces."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SchedulerGauges"]


@dataclass(frozen=True, slots=True)
class SchedulerGauges:
    """Length of the queue, and the KV blocks by what they are used for."""

    waiting: int
    """Requests in the queue."""
    owned: int
    """KV blocks in the tables of requests."""
    fenced: int
    """KV blocks without an owner that a step or a copy in flight still touches."""
    cached: int
    """Free KV blocks that hold a reusable prefix."""
