"""A scheduler with the null runner, driven step by step by a test; every call is audited."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from fd_core.config.envelope import OperatingEnvelope
from fd_core.config.layer_groups import ONE_GROUP
from fd_core.effects.operations import Completion
from fd_core.errors import BadRequest, FdError
from fd_core.kv.prefix import PrefixHasher
from fd_core.plugins import SCHEDULER, installed_plugins
from fd_core.runner.inputs.inputs import BudgetExceeded
from fd_core.scheduling.contract import Scheduler, SchedulerSetup
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.policies import FairShare, Fcfs, Priority, SchedulingPolicy
from fd_core.scheduling.running.drafts import DraftControl
from fd_core.scheduling.victims import FewestTokens, VictimPolicy
from fd_core.testing.kit.law import broken, require
from fd_core.testing.kit.requirements import constructed, lacks
from fd_core.testing.models.drafting import OracleDrafter
from fd_core.testing.models.small import limits_within, small_limits
from fd_core.testing.models.texts import Texts, greedy
from fd_core.testing.schedulers.audit import Auditor, Occupancy, Order, StepClock
from fd_core.testing.schedulers.scripts import NULL_IDS, make_runner, runnable, whole_texts
from fd_core.testing.schedulers.shown import PolicyAuditor
from fd_core.testing.schedulers.tiers import Operation, OperationEnd, ScriptedPeers
from fd_core.types import FinishReason, RequestSpec, StepOutput, StepPlan

_Operation = TypeVar("_Operation", bound=Operation)
ORDERS: Final[Mapping[type[SchedulingPolicy], Order]] = {
    Fcfs: lambda request: ("", (request.arrival,)),
    Priority: lambda request: ("", (request.priority, request.arrival)),
    FairShare: lambda request: (request.tenant, (request.arrival,)),
}
"""Order of admissions under each policy of the core."""


_NOT_AUDITED: Final = {"preemptions", "declined", "declined_tokens", "outcomes"}
"""Counters that are checked after each call, or depend on estimates."""
_OF_STORES: Final = {"loaded_tokens", "lost_tokens", "saved_tokens"}
"""Counters of blocks that are counted for one group of layers without a window."""


class _Answer(NamedTuple):
    plan: StepPlan
    output: StepOutput


@dataclass(frozen=True)
class SchedulerTarget:
    """One scheduler under a name."""

    name: str
    make: Callable[[SchedulerSetup], Scheduler]
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Unsupported features, with reasons."""

    def about(self) -> dict[str, Any]:
        """Return the description for its report card."""
        origin = str(installed_plugins().find(SCHEDULER, self.name).origin)
        return {"distribution": origin, "limits": dict(self.lacks), "envelope": self.envelope.limits()}

    @property
    def envelope(self) -> OperatingEnvelope:
        return getattr(self.make, "envelope", OperatingEnvelope())

    def require(self, ability: str) -> None:
        """Skip the running test, with the reason, if the scheduler lacks an ability."""
        if ability in self.lacks:
            lacks(self.lacks[ability])


def find_scheduler(name: str) -> SchedulerTarget:
    """Return the scheduler `name`. Raises `PluginError` if it is unknown or cannot be constructed."""
    found = installed_plugins().load(SCHEDULER, name)
    limits = limits_within(found.envelope)
    constructed(SCHEDULER, name, lambda: found(SchedulerSetup(limits=limits, policy=Fcfs(), victims=FewestTokens())))
    single = {} if found.groups_layers else {"layer_groups": "it keeps one block table for each request"}
    return SchedulerTarget(name, found, {**found.lacks, **single})


class Driver:
    """Plans, executes and commits one step at a time."""

    def __init__(
        self, target: SchedulerTarget, setup: SchedulerSetup, drafter: OracleDrafter | None, clock: StepClock
    ) -> None:
        """`clock` is that of the setup, if it has one."""
        self.limits, self.clock = setup.limits, clock
        if beyond := target.envelope.exceeded(msgspec.structs.asdict(setup.limits)):
            lacks(f"its envelope has {', '.join(f'{name}={limit}' for name, limit in beyond.items())}")
        order = ORDERS.get(type(setup.policy))
        self.auditor = Auditor(setup.limits, setup.epoch, clock, order, events=setup.kv_events)
        self._shown = PolicyAuditor(setup.policy, setup.victims, self.auditor)
        setup = replace(setup, policy=self._shown.policy, victims=self._shown.victims)
        try:
            self.scheduler = target.make(setup)
        except FdError as error:
            broken("2.5", f"it rejects valid limits {setup.limits}: {error}")
        runner = make_runner(setup.limits, drafter)
        self.execute: Callable[[StepPlan], StepOutput] = runner.execute
        self.tiers = ScriptedPeers(runner.cache, setup.limits.groups)
        self.texts = Texts()
        self._pauses = 0
        self.in_flight: deque[_Answer] = deque()
        self.plans: list[StepPlan] = []
        self.first_plan: dict[str, int] = {}
        """Number of plans before the first admission of each request."""

    def submit(self, *specs: RequestSpec) -> None:
        for spec in specs:
            self.clock.now += 1.0
            try:
                effects = self.scheduler.add(spec)
            except FdError as error:
                broken("8", f"it rejects the request {spec.request_id}: {error}")
            self.auditor.added(spec, effects)
            self.tiers.perform(effects.operations)
        self.audit()

    def abort(self, *names: str) -> None:
        """Abort requests, one after the other; a name may occur twice."""
        for name in names:
            self.clock.now += 1.0
            delta = self.scheduler.abort(name)
            self.auditor.aborted(name, delta)
            self.texts.take([] if delta is None else [delta])
            self.audit()

    def plan(self) -> StepPlan | None:
        """Plan a step and compute it; its output stays in flight."""
        self.clock.now += 1.0
        running = len(self.auditor.live)
        plan, effects = self.scheduler.plan()
        self._shown.planned(plan)
        self.auditor.planned(plan, effects)
        self._check_victims(plan, running)
        self.tiers.perform(effects.operations)
        if plan is not None:
            self.plans.append(plan)
            for admission in plan.admissions:
                self.first_plan.setdefault(admission.request_id, len(self.plans))
            try:
                output = self.execute(runnable(plan))
            except (BudgetExceeded, RuntimeError, IndexError, ValueError) as error:
                broken("8", f"the runner cannot compute step {plan.step}: {error}")
            self.auditor.executed(plan, output)
            self.in_flight.append(_Answer(plan, output))
        self.audit()
        return plan

    def _check_victims(self, plan: StepPlan | None, running: int) -> None:
        """Check that the victim policy chose the preempted requests among several `running` ones."""
        for revoked in () if plan is None or running < 2 or self.auditor.paused else plan.revocations:
            occupancy = self.auditor.occupancies.get(revoked.slot)
            if occupancy is not None and not occupancy.request.abort_requested:
                self._shown.check_victim(occupancy.request)

    def must_plan(self) -> StepPlan:
        """Plan a step if there is something to do."""
        plan = self.plan()
        assert plan is not None
        return plan

    def fill(self, depth: int) -> None:
        """Plan until `depth` steps are in flight or nothing can be planned."""
        while len(self.in_flight) < depth and self.plan() is not None:
            pass

    def answer(self, *failed: int) -> StepPlan:
        """Commit the oldest step in flight, with failed rows for the slots `failed`."""
        self.clock.now += 1.0
        answer = self.in_flight.popleft()
        output = replace(answer.output, errors=tuple((slot, f"slot {slot} failed on purpose") for slot in failed))
        deltas, effects = self.scheduler.commit(answer.plan, output)
        self.auditor.answered(answer.plan, output, deltas, effects)
        self.texts.take(deltas)
        self.tiers.perform(effects.operations)
        self.audit()
        return answer.plan

    def answer_all(self) -> None:
        while self.in_flight:
            self.answer()

    def answer_stale(self, **changes: Any) -> None:
        """Commit an output of another epoch or step for the oldest step in flight, which must be dropped."""
        answer = self.in_flight[0]
        stale = replace(answer.output, **changes)
        self._drop(
            answer.plan, stale, f"an output of epoch {stale.epoch} and step {stale.step}, for {answer.plan.step}"
        )
        counted = self.scheduler.stats().outputs.stale_outputs
        require(counted >= self.auditor.stale, "1.5", f"counted {counted} of {self.auditor.stale} stale outputs")
        self.audit()

    def answer_twice(self) -> None:
        """Commit the oldest step in flight twice; the second output must be dropped."""
        answer = self.in_flight[0]
        self.answer()
        self._drop(answer.plan, answer.output, f"a repeated output of step {answer.plan.step}")

    def _drop(self, plan: StepPlan, output: StepOutput, what: str) -> None:
        deltas, effects = self.scheduler.commit(plan, output)
        self.auditor.dropped(deltas, effects, what)
        self.tiers.perform(effects.operations)

    def pause(self, *aborted: str, arriving: Sequence[RequestSpec] = ()) -> None:
        """Pause, and resume once nothing is in a slot, as an engine does to apply an order, each time another one.

        Requests `aborted` are aborted meanwhile, and those `arriving` are added. Does nothing else if the scheduler
        cannot pause.
        """
        scheduler, auditor = self.scheduler, self.auditor
        try:
            scheduler.pause()
        except BadRequest:
            self.submit(*arriving)
            return
        auditor.paused = True
        self.submit(*arriving)
        self.abort(*aborted)
        scheduler.pause()
        for _ in range(400):
            held = scheduler.held()
            if not (self.in_flight or held.running or held.loading or held.draining or held.fenced):
                break
            if len(self.in_flight) < self.limits.pipeline_depth:
                self.plan()
            if self.in_flight:
                self.answer()
            if self.tiers.pending:
                self.complete(0, OperationEnd.WELL)
        require(not auditor.occupancies, "1.2", f"paused, it holds the slots {sorted(auditor.occupancies)} for ever")
        self._pauses += 1
        nonce = b"%d" % self._pauses
        orders = (scheduler.forget_prefixes, None, partial(scheduler.change_weights, nonce))
        if (order := orders[self._pauses % 3]) is not None:
            with suppress(BadRequest):  # it cannot do that
                effects = order()
                auditor.forgot(effects, new_weights=self._pauses % 3 == 2)
                self.tiers.perform(effects.operations)
                require(not scheduler.held().cached, "3.5", "it holds cached prefixes after an order to drop them")
        auditor.paused = False
        scheduler.resume()
        self.audit()

    def complete(self, index: int, how: OperationEnd) -> None:
        self.tell(self.tiers.complete(index, how))

    def tell(self, completion: Completion) -> None:
        """Report a completed operation or a measurement to the scheduler."""
        self.clock.now += 1.0
        delta = self.scheduler.complete(completion)
        self.auditor.completed(completion, delta)
        self.texts.take([] if delta is None else [delta])
        self.audit()

    def step_alone(self, depth: int = 1) -> None:
        """Fill the pipeline and commit the oldest step; operations outside steps remain open."""
        self.fill(depth)
        if self.in_flight:
            self.answer()

    def step(self, depth: int = 1) -> None:
        """Fill the pipeline, commit the oldest step, and complete one operation."""
        self.step_alone(depth)
        if self.tiers.pending:
            self.complete(0, OperationEnd.WELL)

    def run(self, depth: int = 1, *, watch: Callable[[StepPlan], None] = lambda _: None) -> Texts:
        """Keep `depth` steps in flight until no request is left, in a bounded number of steps; check every text."""
        # Bound on the number of steps: four times that of computing each request alone.
        open_ones = [each for each in self.auditor.requests.values() if each.end is None]
        for _ in range(200 + 4 * sum(len(each.tokens) + each.limit for each in open_ones)):
            while len(self.in_flight) < depth and (plan := self.plan()) is not None:
                watch(plan)
            stuck = not self.in_flight
            if self.in_flight:
                self.answer()
            if self.tiers.pending:
                self.complete(0, OperationEnd.WELL)
            elif stuck:
                break
        left = sorted(self.auditor.unfinished)
        require(not left, "2.2", f"{left} have not ended, with no step in flight or too many steps")
        require(not self.scheduler.has_work, "3.6", "it reports work, but no request is left")
        self.audit()
        self._check_stats()
        requests = self.auditor.requests
        texts = whole_texts(
            [each.spec for each in requests.values()], self.limits.max_model_len, self.limits.vocab_size
        )
        for (name, request), text in zip(requests.items(), texts, strict=True):
            right = text[len(request.spec.delivered) :]
            delivered, end = self.texts.tokens.get(name, []), self.texts.ends.get(name)
            require(
                delivered == right[: len(delivered)],
                "4",
                f"{name}: expected {right[: len(delivered)]}, got {delivered}",
            )
            if end in (FinishReason.STOP, FinishReason.LENGTH):
                require(delivered == right, "4", f"{name} ended after {len(delivered)} of {len(right)} tokens")
            require(end is not FinishReason.ABORT or request.abort_requested, "1.7", f"{name} was not aborted")
        return self.texts

    def _check_stats(self) -> None:
        """Compare numbers that the scheduler counts with those of the auditor, beyond those after each call."""
        stats, auditor = self.scheduler.stats(), self.auditor
        parts = (stats.counters, stats.offload, *filter(None, [stats.transfers]))
        counted = {name: value for part in parts for name, value in msgspec.structs.asdict(part).items()}
        for kind in ("proposed", "accepted"):
            numbers = enumerate(getattr(stats.drafts, f"{kind}_per_position"))
            counted |= {f"{kind} at {place}": number for place, number in numbers}
        for name in counted.keys() - _NOT_AUDITED - (_OF_STORES if self.limits.groups != ONE_GROUP else set()):
            number, right = counted[name], auditor.counts[name]
            require(number in (0, right), "3.6", f"counter {name}: expected {right} (or 0: not counted), got {number}")
        seconds = {name: number for name, number in (stats.phases.seconds if stats.phases else {}).items() if number}
        expected = {name: number for name, number in auditor.seconds.items() if number}
        require(seconds in ({}, expected), "3.6", f"seconds in phases: expected {expected}, got {seconds}")

    def check_policy(self) -> None:
        """Check which events of its requests, all of which ended, the policy was notified of."""
        self._shown.check_ended(Counter(each.request_id for plan in self.plans for each in plan.admissions))

    def check_capacity(self, new: Driver) -> None:
        """Compare the admissions of this idle scheduler with those of a `new` one: nothing may have been lost.

        One group of requests fills the slots, another one the blocks, as far as a step's budget allows.
        """
        limits = self.limits
        per_slot = -(-2 // limits.block_size)
        slots = min(limits.max_num_seqs, limits.num_kv_blocks // per_slot, limits.max_num_batched_tokens)
        longest = limits.max_model_len - 1
        large = min(limits.max_num_seqs, limits.num_kv_blocks // limits.blocks_per_seq)
        rest = limits.num_kv_blocks - large * limits.blocks_per_seq
        last = rest * limits.block_size - 1
        lengths = [longest] * large + [last] * (large < limits.max_num_seqs and last > 0)
        if sum(lengths) > limits.max_num_batched_tokens:
            lengths = [longest]
        for what, sizes in (("slots", [1] * slots), ("blocks", lengths)):
            group = [
                greedy(f"{what}{index}", [(index + at) % 250 for at in range(size)], 1, cache_salt=f"{what}{index}")
                for index, size in enumerate(sizes)
            ]
            found = []
            for driver in (new, self):
                driver.submit(*group)
                while driver.tiers.pending:
                    driver.complete(0, OperationEnd.WELL)
                first = driver.must_plan()
                found.append((len(first.admissions), sum(len(grant.blocks) for grant in first.grants)))
                driver.run()
            right, told = found
            require(told == right, "3.6", f"idle, it admits (requests, blocks) {told} to fill the {what}, not {right}")

    def run_until(self, condition: Callable[[], object], depth: int = 1) -> bool:
        """Plan, or commit if the pipeline is full, until a condition is true; return False if it never is."""
        for _ in range(500):
            if condition():
                return True
            if len(self.in_flight) >= depth or self.plan() is None:
                if not self.in_flight:
                    return False
                self.answer()
        return False

    def begun(self, kind: type[_Operation]) -> list[_Operation]:
        """Return the operations of a kind started so far, in order."""
        return [each for each in self.tiers.begun if isinstance(each, kind)]

    def computed_before(self, name: str) -> list[int]:
        """Return the number of computed tokens at each admission of a request."""
        return [each.computed for plan in self.plans for each in plan.admissions if each.request_id == name]

    def occupancy_of(self, name: str) -> Occupancy | None:
        return self.auditor.requests[name].occupancy

    def audit(self) -> None:
        self._shown.check()
        held, names = self.scheduler.held(), self.scheduler.request_ids()
        self.auditor.held(held, names)
        self.auditor.counted(self.scheduler.stats(), held)
        self.auditor.active(self.scheduler.activities(), held)
        for name in names:
            self.auditor.phases(name, self.scheduler.phases(name))
        auditor = self.auditor
        # An engine sleeps without work, and its watchdog with it.
        left = [*sorted(auditor.unfinished), *map(str, auditor.occupancies.values())]
        left += [type(operation).__name__ for operation in self.tiers.pending]
        works = self.scheduler.has_work or auditor.paused or not left
        require(works, "1.8", f"it reports no work, but these are open: {', '.join(left)}")


def drive(
    target: SchedulerTarget,
    *specs: RequestSpec,
    k: int = 0,
    wrong: float = 0.0,
    caching: bool = True,
    policy: SchedulingPolicy | None = None,
    victims: VictimPolicy | None = None,
    timed: bool = False,
    depth: int = 1,
    known: Sequence[RequestSpec] = (),
    setup: Mapping[str, Any] = MappingProxyType({}),
    keep: OffloadSelection | None = None,
    paired: bool = False,
    **limits: Any,
) -> Driver:
    """Return a scheduler of a small engine with queued requests.

    With `k` > 0 up to k drafts are taken from the expected texts of `specs` and `known`, wrong in that share of the
    tokens. `paired` adds other workers. `depth` is the maximum number of steps in flight; `limits` are fields of
    `Limits`, `setup` other fields of `SchedulerSetup`.
    """
    chosen = small_limits(**{"vocab_size": NULL_IDS, "max_drafts": k, "pipeline_depth": depth, **limits})
    clock = StepClock()
    made = SchedulerSetup(
        limits=chosen,
        policy=policy or Fcfs(),
        victims=victims or FewestTokens(),
        hasher=PrefixHasher(block_size=chosen.block_size, identity="kit") if caching else None,
        drafts=DraftControl(chosen.max_num_seqs, k, 1000) if k else None,
        keep_kv=keep,
        paired=paired,
        clock=clock if timed else None,
        **{"epoch": 3, **setup},
    )
    drafter = None
    if k:
        drafted = (*specs, *known)
        found = whole_texts(drafted, chosen.max_model_len, chosen.vocab_size)
        texts = [[*spec.prompt, *text] for spec, text in zip(drafted, found, strict=True)]
        drafter = OracleDrafter(chosen.max_num_seqs, texts, wrong, seed=0)
    driver = Driver(target, made, drafter, clock)
    driver.submit(*specs)
    return driver


def prompt_of(length: int, number: int = 0) -> list[int]:
    """Return a prompt whose first token is unique among numbers below 1000."""
    rng = np.random.default_rng(1000 + number)
    return [number % 250, number // 250, *rng.integers(0, 256, length).tolist()][:length]
