"""What a whole scheduler is: the settings that it is made from, and what it holds.

`docs/write-a-scheduler.md` shows a whole plugin; `fdcore conformance --scheduler NAME` proves it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fd_core.config import Limits
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.drafts import DraftControl
from fd_core.scheduling.kv_offloading import KeepKV
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.victims import VictimPolicy

__all__ = ["SchedulerHoldings", "SchedulerSetup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSetup:
    """Everything that one scheduler is made from; an engine makes one for each epoch."""

    limits: Limits
    policy: SchedulingPolicy
    """Order of the waiting requests."""
    victims: VictimPolicy
    """Choice of whom to preempt."""
    hasher: PrefixHasher | None = None
    """Names prefixes; None turns prefix caching off."""
    drafts: DraftControl | None = None
    """Decides how many drafts a request may verify; None without speculation."""
    keep_kv: KeepKV | None = None
    """Which KV is kept outside the device; None keeps none."""
    paired: bool = False
    """Whether prompts may be computed by other workers, or for them. Needs a hasher."""
    kv_events: bool = False
    """Whether effects tell which prefixes the device holds. Needs a hasher."""
    epoch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerHoldings:
    """What a scheduler holds at one moment. Requests are counted by their state, blocks by what they are used for."""

    waiting: int = 0
    loading: int = 0
    """Requests in slots whose KV is on its way from outside the device."""
    running: int = 0
    draining: int = 0
    """Revoked slots whose release was not confirmed."""
    owned: int = 0
    """KV blocks in the tables of requests, each counted once."""
    fenced: int = 0
    """KV blocks without an owner that a step or an operation in flight still touches."""
    cached: int = 0
    """Free KV blocks that hold a reusable prefix."""
    operations: int = 0
    """Operations on KV that were not completed."""

    @property
    def idle(self) -> bool:
        """Whether nothing is held. A cached prefix is held by nobody."""
        requests = self.waiting + self.loading + self.running + self.draining
        return not (requests or self.owned or self.fenced or self.operations)
