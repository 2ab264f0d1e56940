"""Wait reasons, what ends a wait, and that waiting costs no time per step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from fd_core.effects.operations import Found, Load, Loaded, Lookup, Save, Saved
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.requests import Request, State
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.types import RequestSpec, StepPlan
from tests.scheduling.driving import HASHER, add, answer, next_plan, num_running, planned, take_effects
from tests.scheduling.driving import scheduler as small_scheduler
from tests.scheduling.driving import spec as small_spec


def scheduler(keep: OffloadSelection | None = None, **given: Any) -> ContinuousBatchingScheduler:
    sizes = {"max_num_batched_tokens": 32, "max_model_len": 200, "num_kv_blocks": 100}
    made = small_scheduler(hasher=HASHER, keep_kv=keep, **{**sizes, **given})
    made.probe().control.growth = lambda *_: 0  # type: ignore[method-assign]  # override: early shortages
    return made


def spec(name: str, length: int = 20, max_tokens: int = 60, first: int = 0) -> RequestSpec:
    return small_spec(name, length, max_tokens, first)


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[Any]:
    """Count the calls of a method; return a list that grows by one with each call."""
    calls: list[Any] = []
    original: Callable[..., Any] = getattr(owner, name)

    def counting(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(owner, name, counting)
    return calls


def start_of(plan: StepPlan, request: Request) -> int:
    """Return the first position that a plan computes for a request."""
    return int(plan.starts[plan.slots.tolist().index(request.slot)])


# Cost of waiting ----------------------------------------------------------------------------------------------


@pytest.mark.law("2.6")
def test_large_queue_after_blocked_head_is_not_scanned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = scheduler(num_kv_blocks=60)
    add(s, spec("running", 120, 60, first=50_000))
    for _ in range(4):
        answer(s, planned(s))
    for index in range(10_000):
        add(s, spec(str(index), 150, first=index))
    matches = counted(monkeypatch, s.probe().pool, "match")
    hashes = counted(monkeypatch, s.probe().prefixes, "keys")
    for _ in range(40):
        answer(s, planned(s))
    assert (num_running(s), len(s.probe().waiting)) == (1, 10_000)
    assert len(matches) <= 4, "the head of the queue is checked once, and again now and then"
    assert len(hashes) <= 4


@pytest.mark.law("2.6")
def test_queue_is_not_scanned_when_all_slots_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler(max_num_seqs=1)
    add(s, spec("running"))
    answer(s, planned(s))
    for index in range(1000):
        add(s, spec(str(index), first=index))
    matches = counted(monkeypatch, s.probe().pool, "match")
    for _ in range(20):
        answer(s, planned(s))
    assert not matches


def test_requests_waiting_for_one_prefix_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler(max_num_batched_tokens=32, max_num_seqs=2)
    add(s, spec("first", 31))
    prefill = planned(s)
    for index in range(1000):
        add(s, spec(str(index), 31))
    checks = counted(monkeypatch, s.probe().prefixes, "awaited")
    for _ in range(14):
        planned(s)
    assert (s.probe().waiting.num_parked, num_running(s)) == (1000, 1)
    assert len(checks) == 1000
    answer(s, prefill)
    assert s.probe().waiting.num_parked == 0


def test_blocked_head_is_admitted_first_when_blocks_are_freed() -> None:
    s = scheduler(num_kv_blocks=60)
    add(s, spec("running", 120, 60, first=50_000))
    for _ in range(4):
        answer(s, planned(s))
    large, small = add(s, spec("large", 150)), add(s, spec("small", 6, first=500))
    for _ in range(20):
        answer(s, planned(s))
    assert (large.state, small.state) == (State.WAITING, State.WAITING)
    s.abort("running")
    for _ in range(2):
        answer(s, planned(s))
    assert large.state is State.RUNNING


def test_blocked_head_is_rechecked_without_freed_blocks() -> None:
    """The expected demand of running requests may shrink as well."""
    s = scheduler(num_kv_blocks=60)
    add(s, spec("running", 60, 100))
    for _ in range(3):
        answer(s, planned(s))
    control = s.probe().control
    control.growth = control.largest_growth = lambda *_: 1000  # type: ignore[method-assign]  # override
    waiting = add(s, spec("a", 20, first=500))
    answer(s, planned(s))
    control.growth = control.largest_growth = lambda *_: 0  # type: ignore[method-assign]  # override
    steps = 0
    while waiting.state is State.WAITING:
        answer(s, planned(s))
        steps += 1
    assert 1 < steps <= 20


# Prefix waits -------------------------------------------------------------------------------------------------


def waiting_for_a_prefix(s: ContinuousBatchingScheduler) -> tuple[StepPlan, Request]:
    """Return the step that computes all of prompt `a`, and a request with the same prompt that waits for it."""
    add(s, spec("a"))
    request = add(s, spec("b"))
    plan = planned(s)
    assert 20 in plan.num_tokens.tolist()
    assert (request.state, s.probe().waiting.num_parked) == (State.WAITING, 1)
    return plan, request


def test_prefix_wait_ends_when_prefix_is_complete() -> None:
    s = scheduler()
    prefill, request = waiting_for_a_prefix(s)
    decode = planned(s)
    assert request.state is State.WAITING
    answer(s, prefill)
    assert s.probe().waiting.num_parked == 0
    assert start_of(planned(s), request) == 16
    answer(s, decode)


def test_prefix_wait_ends_when_shared_part_is_complete() -> None:
    s = scheduler(max_num_batched_tokens=16)
    add(s, spec("a", 60))
    plan = planned(s)
    request = add(s, spec("b", 14))
    shorter = planned(s)
    third, fourth = planned(s), planned(s)
    assert fourth.num_tokens.tolist() == [12]
    assert (request.state, s.probe().waiting.num_parked) == (State.WAITING, 1)
    answer(s, plan)
    assert s.probe().waiting.num_parked == 0, "it waits only for the first 16 tokens"
    assert start_of(planned(s), request) == 12
    for late in (shorter, third, fourth):
        answer(s, late)


def test_prefix_wait_ends_when_computing_request_is_aborted() -> None:
    s = scheduler()
    prefill, request = waiting_for_a_prefix(s)
    s.abort("a")
    assert start_of(planned(s), request) == 0
    answer(s, prefill)


def test_prefix_wait_ends_when_computing_request_is_preempted() -> None:
    s = scheduler()
    add(s, spec("old", 11, first=500))
    answer(s, planned(s))
    prefill, request = waiting_for_a_prefix(s)
    pool = s.probe().pool
    hostage = pool.allocate(pool.num_free)
    assert hostage is not None
    revoking = planned(s)
    assert [revoked.slot for revoked in revoking.revocations] == [1], "`old` needs a block"
    assert s.probe().waiting.num_parked == 0
    pool.release(hostage, -1)
    assert start_of(planned(s), request) == 0
    for plan in (prefill, revoking):
        answer(s, plan)


def test_prefix_wait_ends_when_loading_request_is_aborted() -> None:
    s = scheduler(OffloadSelection())
    loading, request = add(s, spec("a")), add(s, spec("b"))
    for effect in take_effects(s):
        assert isinstance(effect, Lookup)
        s.complete(Found(effect.operation, 4, 4))
    assert next_plan(s) is None
    assert (loading.state, request.state, s.probe().waiting.num_parked) == (State.LOADING, State.WAITING, 1)
    assert len([effect for effect in take_effects(s) if isinstance(effect, Load)]) == 1
    s.abort("a")
    assert s.probe().waiting.num_parked == 0
    assert next_plan(s) is None
    assert request.state is State.LOADING


@pytest.mark.parametrize(("loaded", "start"), [(4, 16), (2, 8), (0, 0)])
def test_prefix_wait_covers_rest_after_short_load(loaded: int, start: int) -> None:
    s = scheduler(OffloadSelection())
    loading, request = add(s, spec("a")), add(s, spec("b"))
    for effect in take_effects(s):
        assert isinstance(effect, Lookup)
        s.complete(Found(effect.operation, 4, 4))
    assert next_plan(s) is None
    (load,) = take_effects(s)
    s.complete(Loaded(load.operation, loaded))  # type: ignore[union-attr]  # a load
    plan = planned(s)
    assert start_of(plan, loading) == start
    assert (request.state is State.WAITING) == (loaded < 4)
    if loaded < 4:
        answer(s, plan)
        plan = planned(s)
    assert start_of(plan, request) == 16
    assert take_effects(s) == []


def test_prefix_wait_expires_and_does_not_restart() -> None:
    """The step that computes the prefix does not complete while another request continues."""
    s = scheduler()
    add(s, spec("other", 8, first=600))
    answer(s, planned(s))
    _, request = waiting_for_a_prefix(s)
    steps = 0
    plan = planned(s)
    while request.state is State.WAITING:
        plan = planned(s)
        steps += 1
        assert steps < 100, "it waits forever"
    assert 10 <= steps <= 25
    assert start_of(plan, request) == 0
    assert s.probe().prefixes.num_computing


def test_first_of_two_computing_requests_ends_prefix_wait() -> None:
    s = scheduler()
    add(s, spec("other", 8, first=600))
    answer(s, planned(s))
    prefill, impatient = waiting_for_a_prefix(s)
    while impatient.state is State.WAITING:
        planned(s)
    third = add(s, spec("c"))
    planned(s)
    assert (third.state, s.probe().waiting.num_parked) == (State.WAITING, 1)
    # The outputs between the prefill of `a` and this step do not matter here.
    upto = prefill.starts[-1:] + prefill.num_tokens[-1:]
    s.probe().running_batch.settle(prefill.slots[-1:].astype(int), upto, prefill.step)
    assert s.probe().waiting.num_parked == 0
    assert start_of(planned(s), third) == 16


def test_prefix_wait_continues_if_one_of_two_is_aborted() -> None:
    s = scheduler()
    add(s, spec("other", 8, first=600))
    answer(s, planned(s))
    _, impatient = waiting_for_a_prefix(s)
    while impatient.state is State.WAITING:
        planned(s)
    third = add(s, spec("c"))
    planned(s)
    s.abort("a")
    planned(s)
    assert (third.state, s.probe().waiting.num_parked) == (State.WAITING, 1)
    s.abort("b")
    planned(s)
    assert third.state is State.RUNNING


# Aborts -------------------------------------------------------------------------------------------------------


def is_ready(s: ContinuousBatchingScheduler) -> None:
    """All slots are taken."""
    for index in range(4):
        add(s, spec(f"other {index}", 4, first=500 + index))
    planned(s)
    add(s, spec("a"))


def does_not_fit(s: ContinuousBatchingScheduler) -> None:
    hostage = s.probe().pool.allocate(98)
    assert hostage is not None
    add(s, spec("a"))
    assert next_plan(s) is None


def waits_for_a_prefix(s: ContinuousBatchingScheduler) -> None:
    add(s, spec("b"))
    add(s, spec("a"))
    planned(s)
    assert s.probe().waiting.num_parked == 1


def waits_for_a_lookup(s: ContinuousBatchingScheduler) -> None:
    s.probe().offloading.keep = OffloadSelection()
    add(s, spec("a"))
    assert s.probe().waiting.num_parked == 1


def waits_for_its_save(s: ContinuousBatchingScheduler) -> None:
    add(s, spec("old", 12, first=500))
    answer(s, planned(s))
    add(s, spec("a", 24))
    answer(s, planned(s))
    s.probe().offloading.keep = OffloadSelection()
    pool = s.probe().pool
    hostage = pool.allocate(pool.num_free)
    plan = planned(s)
    while not plan.revocations:
        answer(s, plan)
        plan = planned(s)
    answer(s, plan)
    assert hostage is not None
    assert s.probe().waiting.num_parked == 1


@pytest.mark.parametrize("state", [is_ready, does_not_fit, waits_for_a_prefix, waits_for_a_lookup, waits_for_its_save])
def test_abort_while_waiting_leaves_no_state(
    state: Callable[[ContinuousBatchingScheduler], None],
) -> None:
    s = scheduler()
    state(s)
    waiting = len(s.probe().waiting)
    tokens = weakref.ref(s.probe().requests["a"].tokens._data)
    assert s.abort("a")
    assert len(s.probe().waiting) == waiting - 1
    for effect in take_effects(s):
        # The state of an operation is dropped when it ends.
        if isinstance(effect, Lookup):
            s.complete(Found(effect.operation, 0, 0))
        elif isinstance(effect, Save):
            s.complete(Saved(effect.operation, 0))
    gc.collect()
    assert tokens() is None
    next_plan(s)
