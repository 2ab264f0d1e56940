"""Request durations: all time is attributed, under the correct wait reason."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.config import Limits
from fd_core.effects.operations import Found, Load, Loaded, Lookup, Save, Saved
from fd_core.scheduling.contract import RequestActivity, SchedulerSetup
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.policies import Fcfs
from fd_core.scheduling.requests import State
from fd_core.scheduling.running.plan import PlanBuilder
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import LatestArrival
from fd_core.types import PHASE_NAMES, Delta, Phase, RequestSpec, SamplingParams
from fd_core.types.metrics import read_metrics
from tests.scheduling.driving import HASHER, add, answer, next_plan, planned, take_effects

LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=4, num_kv_blocks=40, vocab_size=100
)


class ManualClock:
    """Manually advanced clock."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(
    clock: Callable[[], float] | None, kind: type[ContinuousBatchingScheduler] = ContinuousBatchingScheduler, **own: int
) -> ContinuousBatchingScheduler:
    keep = OffloadSelection() if own.pop("keep", 0) else None
    limits = msgspec.structs.replace(LIMITS, **own)
    setup = SchedulerSetup(
        limits=limits, policy=Fcfs(), victims=LatestArrival(), hasher=HASHER, keep_kv=keep, clock=clock
    )
    scheduler = kind(setup)
    scheduler.probe().control.growth = lambda *_: 0  # type: ignore[method-assign]  # override: early shortages
    return scheduler


def spec(name: str, length: int = 10, max_tokens: int = 4, first: int = 0) -> RequestSpec:
    prompt = tuple((first + index) % 90 for index in range(length))
    return RequestSpec(request_id=name, prompt=prompt, params=SamplingParams(max_tokens=max_tokens))


def durations_of(scheduler: ContinuousBatchingScheduler, name: str) -> dict[str, float]:
    """Return the non-zero durations of a request, by wait reason."""
    phases = scheduler.phases(name)
    assert phases is not None
    return {PHASE_NAMES[index]: seconds for index, seconds in enumerate(phases) if seconds}


def step(scheduler: ContinuousBatchingScheduler, clock: ManualClock, seconds: float = 1.0) -> list[Delta]:
    plan = next_plan(scheduler)
    clock.now += seconds
    return [] if plan is None else answer(scheduler, plan)


def test_no_durations_without_a_clock() -> None:
    scheduler = made(None)
    add(scheduler, spec("one"))
    assert scheduler.phases("one") is None and scheduler.stats().phases is None
    assert {delta.phases for delta in answer(scheduler, planned(scheduler))} == {None}


def test_slot_wait_is_reported_with_first_and_last_delta() -> None:
    clock = ManualClock()
    scheduler = made(clock, max_num_seqs=1)
    add(scheduler, spec("first", max_tokens=2))
    add(scheduler, spec("second", max_tokens=3, first=50))
    deltas = [delta for _ in range(5) for delta in step(scheduler, clock) if delta.request_id == "second"]
    seconds = [delta.phases for delta in deltas]
    assert seconds[1] is None
    assert seconds[0] is not None and seconds[2] is not None
    assert (seconds[0][Phase.SLOT], seconds[0][Phase.COMPUTING], sum(seconds[0])) == (2.0, 1.0, 3.0)
    assert (seconds[2][Phase.SLOT], seconds[2][Phase.COMPUTING], sum(seconds[2])) == (2.0, 3.0, 5.0)
    samples = {spec.name: samples for spec, samples in read_metrics(scheduler.stats())}["request_seconds"]
    assert (("slot",), 2.0) in samples and (("computing",), 5.0) in samples


def test_activities_name_the_current_state_and_wait_reason() -> None:
    scheduler = made(None, max_num_seqs=1)
    assert scheduler.activities() == {}
    add(scheduler, spec("first", max_tokens=2))
    add(scheduler, spec("second", first=50))
    plan = planned(scheduler)
    assert scheduler.activities() == {
        "first": RequestActivity("running", Phase.COMPUTING),
        "second": RequestActivity("waiting", Phase.SLOT),
    }
    scheduler.pause()
    answer(scheduler, plan)
    revoking = planned(scheduler)
    assert scheduler.activities()["first"].state == "draining"
    answer(scheduler, revoking)
    assert scheduler.activities() == {
        "first": RequestActivity("waiting", Phase.PREEMPTED),
        "second": RequestActivity("waiting", Phase.SCHEDULER),
    }


def test_wait_for_blocks_is_reported() -> None:
    clock = ManualClock()
    scheduler = made(clock, num_kv_blocks=16)
    add(scheduler, spec("large", 60, 3))
    add(scheduler, spec("next", 10, first=50))
    add(scheduler, spec("later", 1, first=70))
    for _ in range(2):
        step(scheduler, clock)
    assert durations_of(scheduler, "next") == durations_of(scheduler, "later") == {"blocks": 2.0}


def test_exhausted_budget_is_reported_queued_and_running() -> None:
    clock = ManualClock()
    scheduler = made(clock, max_num_batched_tokens=8)
    for index in range(3):
        add(scheduler, spec(str(index), 12, first=30 * index))
    step(scheduler, clock)  # 8 of the first
    step(scheduler, clock)  # 4 of the first, 4 of the second
    step(scheduler, clock)  # 1 of the first, 7 of the second
    assert durations_of(scheduler, "1") == {"budget": 1.0, "computing": 2.0}
    assert durations_of(scheduler, "2") == {"budget": 3.0}
    narrow = made(clock, max_num_batched_tokens=2, keep=1)
    for index in range(3):
        add(narrow, spec(str(index), 8, 20, first=30 * index))
    for lookup in take_effects(narrow):
        assert isinstance(lookup, Lookup)
        narrow.complete(Found(lookup.operation, 0, 1))
    next_plan(narrow)
    for load in take_effects(narrow):
        assert isinstance(load, Load)
        narrow.complete(Loaded(load.operation, 1))
    left_out = [0.0, 0.0, 0.0]
    for _ in range(12):
        plan = planned(narrow)
        clock.now += 1.0
        for slot in {0, 1, 2} - set(plan.slots.tolist()):
            left_out[slot] += 1.0
        answer(narrow, plan)
    found = [durations_of(narrow, name) for name in "012"]
    assert [sum(each.values()) for each in found] == [12.0] * 3
    assert [each["budget"] for each in found] == left_out and min(left_out) >= 3


def test_wait_for_shared_prefix_is_reported() -> None:
    clock = ManualClock()
    scheduler = made(clock, max_num_batched_tokens=8)
    add(scheduler, spec("first", 16))
    step(scheduler, clock)
    add(scheduler, spec("same", 24))
    for _ in range(3):
        step(scheduler, clock)
    assert durations_of(scheduler, "same") == {"budget": 1.0, "computing": 2.0}
    wide = made(clock, max_num_batched_tokens=12)
    add(wide, spec("first", 20))
    step(wide, clock)
    add(wide, spec("same", 24))
    step(wide, clock)
    assert durations_of(wide, "same") == {"prefix": 1.0}
    step(wide, clock)
    assert durations_of(wide, "same") == {"prefix": 1.0, "computing": 1.0}


def test_store_lookup_and_load_are_reported() -> None:
    clock = ManualClock()
    scheduler = made(clock, keep=1)
    add(scheduler, spec("stored", 18))
    (lookup,) = take_effects(scheduler)
    assert isinstance(lookup, Lookup)
    clock.now += 0.5
    scheduler.complete(Found(lookup.operation, 0, 4))
    assert next_plan(scheduler) is None
    (load,) = take_effects(scheduler)
    assert isinstance(load, Load)
    clock.now += 0.25
    scheduler.complete(Loaded(load.operation, 4))
    (delta,) = step(scheduler, clock)
    assert delta.phases is not None
    assert (delta.phases[Phase.STORE], delta.phases[Phase.COMPUTING], sum(delta.phases)) == (0.75, 1.0, 1.75)


def test_preemption_is_reported_until_resumed() -> None:
    clock = ManualClock()
    scheduler = made(clock, num_kv_blocks=9)
    add(scheduler, spec("old", 12, 14))
    add(scheduler, spec("young", 12, 14, first=50))
    while scheduler.stats().counters.preemptions == 0:
        step(scheduler, clock)
    ran = durations_of(scheduler, "young")
    while scheduler.probe().requests["young"].state is not State.RUNNING:
        assert set(durations_of(scheduler, "young")) == {"computing", "preempted"}
        step(scheduler, clock)
    back = durations_of(scheduler, "young")
    step(scheduler, clock)
    assert back["preempted"] >= 5 and durations_of(scheduler, "young")["computing"] == back["computing"] + 1
    assert ran["computing"] <= back["computing"] <= ran["computing"] + 1


def test_custom_admission_rule_is_reported() -> None:
    class Closed(ContinuousBatchingScheduler):
        def admit(self, draft: PlanBuilder, step: int) -> None:
            pass

    clock = ManualClock()
    scheduler = made(clock, Closed)
    add(scheduler, spec("one"))
    step(scheduler, clock)
    step(scheduler, clock)
    assert durations_of(scheduler, "one") == {"scheduler": 2.0}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.integers(16, 40),
    st.sampled_from([6, 16, 64]),
    st.booleans(),
)
def test_durations_cover_all_time_queued_and_running(
    seed: int, slots: int, blocks: int, budget: int, keep: bool
) -> None:
    """A second account samples the states of all requests whenever the clock advances."""
    draw, clock = np.random.default_rng(seed), ManualClock()
    scheduler = made(clock, max_num_seqs=slots, num_kv_blocks=blocks, max_num_batched_tokens=budget, keep=int(keep))
    arrived: dict[str, float] = {}
    inside: dict[str, float] = {}
    leaving: dict[str, float] = {}
    outside = (Phase.SLOT, Phase.BLOCKS, Phase.BUDGET, Phase.SCHEDULER, Phase.PREFIX, Phase.STORE, Phase.PREEMPTED)

    def move() -> None:
        seconds = float(draw.exponential())
        clock.now += seconds
        for name, request in scheduler.probe().requests.items():
            if request.state is State.RUNNING:
                inside[name] += seconds
            elif request.state is State.DRAINING:
                leaving[name] += seconds

    def ended(deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.phases is None:
                continue
            name = delta.request_id
            assert min(delta.phases) >= 0
            assert sum(delta.phases) == pytest.approx(clock.now - arrived[name])
            waited = clock.now - arrived[name] - inside[name] - leaving[name]
            assert delta.phases[Phase.COMPUTING] <= inside[name] + leaving[name] + 1e-6
            assert sum(delta.phases[phase] for phase in outside) >= waited - 1e-6

    for index in range(60):
        if index < 30 and draw.random() < 0.6:
            name = str(index)
            arrived[name], inside[name], leaving[name] = clock.now, 0.0, 0.0
            length, most = int(draw.integers(1, 40)), int(draw.integers(1, 20))
            add(scheduler, spec(name, length, most, first=int(draw.integers(0, 3)) * 20))
        move()
        if draw.random() < 0.1 and scheduler.request_ids():
            last = scheduler.abort(str(draw.choice(scheduler.request_ids())))
            ended([] if last is None else [last])
        for effect in take_effects(scheduler):
            move()
            match effect:
                case Lookup():
                    scheduler.complete(Found(effect.operation, 0, int(draw.integers(0, 3))))
                case Load():
                    scheduler.complete(Loaded(effect.operation, int(draw.integers(0, len(effect.blocks) + 1))))
                case Save():
                    scheduler.complete(Saved(effect.operation, 0))
        plan = next_plan(scheduler)
        move()
        if plan is not None:
            ended(answer(scheduler, plan))
