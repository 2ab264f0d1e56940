"""Scheduler contract: construction settings, a few methods, and the resources that a scheduler holds.

A scheduler decides what each step computes and applies each step's output to its requests. It is pure: no I/O, no
clock, no randomness, no threads. It takes frozen values and returns frozen values. `docs/extend/write-a-scheduler.md`
shows a complete plugin, built from the parts in this package; `fdcore conformance --scheduler NAME` verifies that it
holds the invariants.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import msgspec

from fd_core.config import Limits
from fd_core.config.envelope import OperatingEnvelope
from fd_core.effects.operations import Completion, Effects
from fd_core.errors import BadRequest
from fd_core.kv.blocks import BlockStats
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.operations.kv_offloading import OffloadCounters, OffloadSelection, Pace
from fd_core.scheduling.operations.kv_transferring import TransferCounters
from fd_core.scheduling.phases import PhaseCounters
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.running.drafts import DraftControl, DraftStats
from fd_core.scheduling.running.output_processor import OutputCounters
from fd_core.scheduling.running.running_batch import SchedulerCounters
from fd_core.scheduling.running.slots import SlotStats
from fd_core.scheduling.victims import VictimPolicy
from fd_core.types import Delta, Phase, RequestSpec, StepOutput, StepPlan

__all__ = ["RequestActivity", "Scheduler", "SchedulerHoldings", "SchedulerSetup", "SchedulerStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSetup:
    """Construction settings of a scheduler; an engine creates one scheduler for each epoch."""

    limits: Limits
    policy: SchedulingPolicy
    """Order of the waiting requests."""
    victims: VictimPolicy
    """Chooses the request to preempt."""
    hasher: PrefixHasher | None = None
    """Hashes prefixes; None turns prefix caching off."""
    drafts: DraftControl | None = None
    """Decides how many drafts a request may verify; None without speculation."""
    keep_kv: OffloadSelection | None = None
    """Requests whose KV is stored outside the device; None stores none."""
    paired: bool = False
    """True if prompts may be computed by other workers, or for them. Needs a hasher."""
    kv_events: bool = False
    """True if effects include events for all prefixes that the device holds. Needs a hasher."""
    epoch: int = 1
    first_step: int = 0
    """Number of the first plan. The kit begins just below powers of two, where a number in too few bits overflows."""
    clock: Callable[[], float] | None = None
    """Clock in seconds, for phase durations of requests; must not influence decisions. None turns durations off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerHoldings:
    """Snapshot of the resources that a scheduler holds: requests by state, blocks by use."""

    waiting: int = 0
    loading: int = 0
    """Requests in slots whose KV is being loaded from outside the device."""
    running: int = 0
    draining: int = 0
    """Preempted or aborted slots whose release was not acknowledged."""
    owned: int = 0
    """KV blocks in the tables of requests, each counted once."""
    fenced: int = 0
    """KV blocks without an owner that a step or an operation in flight still touches."""
    cached: int = 0
    """Free KV blocks that hold a reusable prefix."""
    operations: int = 0
    """Operations outside steps that were not completed."""

    @property
    def idle(self) -> bool:
        """Return True if nothing is held. Cached prefixes do not count as held."""
        requests = self.waiting + self.loading + self.running + self.draining
        return not (requests or self.owned or self.fenced or self.operations)


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
    """KV transfers between workers; None for a worker that prefills and decodes."""
    phases: PhaseCounters | None = None
    """Time that requests spent in each phase; None if the scheduler does not measure it."""


class RequestActivity(msgspec.Struct, frozen=True, array_like=True):
    """Activity of a request inside an engine."""

    state: str
    """`waiting`, `loading`, `running` or `draining`, as in `SchedulerHoldings`."""
    phase: Phase
    """Its activity, or the reason why it waits."""


class Scheduler(abc.ABC):
    """Plans steps and applies their outputs, for one engine and one epoch. Called from one thread.

    `plan` is called for each step, `commit` for each output in the order of the plans; up to
    `limits.pipeline_depth` plans are in flight. Two schedulers with the same calls return the same, which never changes
    later. A new request may have the id of one that ended. Logs show no prompts, and have no line for each step.
    """

    lacks: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Unsupported features, with reasons: `prefix_caching` (shares no KV; otherwise requests start after all
    blocks whose KV the device holds, also those of answers), `storage` (stores no KV outside the device), `pairs`
    (works with no other prefill or decode worker), `whole_prompts` (divides prompts, so it serves no encoders).
    Sections 1 to 4 are mandatory in full."""
    groups_layers: ClassVar[bool] = False
    """True if it keeps block tables for each of `Limits.groups`; otherwise there is always one group."""
    envelope: ClassVar[OperatingEnvelope] = OperatingEnvelope()
    """Largest settings that it supports, by default any."""

    def __init__(self, setup: SchedulerSetup) -> None:
        self.limits = setup.limits

    @abc.abstractmethod
    def add(self, spec: RequestSpec) -> Effects:
        """Queue a request; return the operations to perform outside steps before it can enter a slot.

        Raises `BadRequest` if the request can never run here, see `fd_core.scheduling.requests.check_spec`.
        """

    @abc.abstractmethod
    def abort(self, request_id: str) -> Delta | None:
        """Request the end of a request; return its last delta if it ended at once, as it does while it waits or loads.

        A running request is aborted by the next plan; its last delta follows with that output. Unknown ids and repeated
        aborts are ignored.
        """

    @abc.abstractmethod
    def plan(self) -> tuple[StepPlan | None, Effects]:
        """Decide the next step, None if a step could do nothing now; also return operations outside steps.

        Steps in flight do not prevent the next one: it computes the tokens that they will sample.
        """

    @abc.abstractmethod
    def commit(self, plan: StepPlan, output: StepOutput) -> tuple[list[Delta], Effects]:
        """Apply the output of `plan`; return the deltas for clients and the operations to perform outside steps.

        There is at most one delta for each request. Raises `fd_core.signals.MalformedOutput` if the backend broke the
        protocol.
        """

    def complete(self, completion: Completion) -> Delta | None:
        """Apply a completion, or a change of the known stored KV; return the last delta of a request that ends.

        A scheduler without operations does nothing.
        """
        return None

    def pause(self) -> None:
        """Preempt every running request with the next plans, and admit none until `resume`. Idempotent.

        Requests keep their tokens and the order in which they wait, new ones may be added, and all may be aborted.
        Raises `BadRequest` if this scheduler cannot pause.
        """
        raise BadRequest(f"the scheduler {type(self).__name__} cannot pause; start the server with another --scheduler")

    def resume(self) -> None:  # noqa: B027 - a scheduler that cannot pause has nothing to resume
        """Admit requests again. Idempotent."""

    def forget_prefixes(self) -> Effects:
        """Forget the prefixes in the device cache. Called while it is paused and no slot is occupied."""
        raise BadRequest(f"the scheduler {type(self).__name__} cannot forget prefixes")

    def change_weights(self, nonce: bytes) -> Effects:
        """Forget all KV, which other weights computed: nothing that is stored under earlier keys is used again.

        Called while it is paused and no slot is occupied. `nonce` distinguishes the keys of KV from now on.
        """
        raise BadRequest(f"the scheduler {type(self).__name__} cannot change weights")

    @abc.abstractmethod
    def request_ids(self) -> list[str]:
        """Return the ids of all requests that have not ended."""

    def phases(self, request_id: str) -> tuple[float, ...] | None:
        """Return the seconds of a request that has not ended, by the number of the `Phase`; None if not measured."""
        return None

    def activities(self) -> dict[str, RequestActivity]:
        """Return the current activity of the requests that have not ended, by id; none if they are not tracked."""
        return {}

    @abc.abstractmethod
    def held(self) -> SchedulerHoldings:
        """Return the resources that are currently held."""

    @property
    def has_work(self) -> bool:
        """Return True if a plan, an output or a completion may still be needed. Called before every step."""
        return not self.held().idle

    def stats(self) -> SchedulerStats:
        """Return current gauges and counters; the gauges alone, unless a scheduler counts more.

        Dropped outputs must be counted, in `outputs.stale_outputs`.
        """
        held = self.held()
        slots = SlotStats(running=held.running, loading=held.loading, draining=held.draining, waiting=held.waiting)
        blocks = BlockStats(used=held.owned, fenced=held.fenced, cached=held.cached, total=self.limits.num_kv_blocks)
        return SchedulerStats(slots=slots, blocks=blocks)

    def check_integrity(self) -> None:  # noqa: B027 - the kit checks from outside
        """Raise `RuntimeError` if slots, requests and blocks contradict each other; for audits."""
