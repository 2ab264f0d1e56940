"""Lookups, saves and loads of offloaded KV, and what a preempted request waits for."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from fd_core.effects.operations import Cancel, Effect, Found, Load, Loaded, Lookup, Save, Saved
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.requests import Request, State
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.types import FinishReason, RequestSpec
from tests.scheduling.driving import HASHER, add, answer, next_plan, planned, take_effects
from tests.scheduling.driving import scheduler as small_scheduler
from tests.scheduling.driving import spec as small_spec

_E = TypeVar("_E", bound=Effect)


def scheduler(keep: OffloadSelection | None = None, **given: Any) -> ContinuousBatchingScheduler:
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    made = small_scheduler(hasher=HASHER, keep_kv=keep or OffloadSelection(), **{**sizes, **given})
    made.probe().control.growth = lambda *_: 0  # type: ignore[method-assign]  # override: early shortages
    return made


def spec(name: str, length: int = 18, max_tokens: int = 4, first: int = 0) -> RequestSpec:
    return small_spec(name, length, max_tokens, first)


def effect_of(s: ContinuousBatchingScheduler, kind: type[_E]) -> _E:
    """Return the scheduler's single effect, which has this type."""
    (effect,) = take_effects(s)
    assert isinstance(effect, kind)
    return effect


def have_on_device(s: ContinuousBatchingScheduler, keys: tuple[bytes, ...]) -> None:
    """Fill free blocks with a prefix."""
    pool = s.probe().pool
    blocks = pool.allocate(len(keys))
    assert blocks is not None
    pool.register(blocks.tolist(), keys)
    pool.release(blocks, -1)


def test_prefix_evicted_while_waiting_is_looked_up_once() -> None:
    s = scheduler()
    add(s, spec("before"))
    first = effect_of(s, Lookup)
    s.abort("before")
    assert take_effects(s) == [Cancel(first.operation)]
    s.complete(Found(first.operation, 0, 0))

    have_on_device(s, first.keys)
    request = add(s, spec("a"))
    assert take_effects(s) == [], "the whole prefix is on the device"
    s.probe().pool.forget_prefixes()

    assert next_plan(s) is None
    again = effect_of(s, Lookup)
    assert again.keys == first.keys
    assert request.state is State.WAITING
    assert next_plan(s) is None, "the lookup is pending"
    assert take_effects(s) == []

    s.complete(Found(again.operation, 3, 3))
    next_plan(s)
    assert effect_of(s, Load).keys == first.keys[:3]


def test_prefix_absent_everywhere_is_looked_up_once() -> None:
    s = scheduler()
    add(s, spec("a"))
    assert next_plan(s) is None, "the lookup is pending"
    s.complete(Found(effect_of(s, Lookup).operation, 0, 0))
    assert planned(s).num_tokens.tolist() == [18]
    assert take_effects(s) == []


# Resuming a preempted request ---------------------------------------------------------------------------------


def preempted(s: ContinuousBatchingScheduler, stored: int = 0) -> tuple[Request, Save]:
    """Return a request preempted for lack of blocks, with the save of its KV; `stored` blocks were saved before."""
    for name, first, total in (("old", 40, 0), ("young", 0, stored)):
        add(s, spec(name, 10, 30, first))
        s.complete(Found(effect_of(s, Lookup).operation, total, total))
    young = s.probe().requests["young"]
    plan = planned(s)
    while not plan.revocations:
        answer(s, plan)
        plan = planned(s)
    save = effect_of(s, Save)
    assert young.state is State.DRAINING
    answer(s, plan)
    assert (young.state, take_effects(s)) == (State.WAITING, [])
    return young, save


def end_of(s: ContinuousBatchingScheduler, request_id: str) -> None:
    """Abort a running request and wait until its slot is freed."""
    s.abort(request_id)
    answer(s, planned(s))


def test_preempted_request_waits_for_save_without_lookup() -> None:
    s = scheduler(num_kv_blocks=10)
    young, save = preempted(s)
    end_of(s, "old")
    assert next_plan(s) is None, "there is room, but its KV is still copied"
    assert take_effects(s) == []
    s.complete(Saved(save.operation, len(save.keys), host=len(save.keys)))
    s.probe().pool.forget_prefixes()
    assert next_plan(s) is None
    load = effect_of(s, Load)
    assert load.keys == save.keys
    s.complete(Loaded(load.operation, len(load.keys)))
    plan = planned(s)
    assert plan.starts.tolist() == [4 * len(save.keys)]
    assert (young.state, take_effects(s)) == (State.RUNNING, [])


def test_save_completed_before_release_needs_no_wait_or_lookup() -> None:
    s = scheduler(num_kv_blocks=10)
    for name, first in (("old", 40), ("young", 0)):
        add(s, spec(name, 10, 30, first))
        s.complete(Found(effect_of(s, Lookup).operation, 0, 0))
    plan = planned(s)
    while not plan.revocations:
        answer(s, plan)
        plan = planned(s)
    save = effect_of(s, Save)
    s.complete(Saved(save.operation, len(save.keys), host=len(save.keys)))
    answer(s, plan)
    s.probe().pool.forget_prefixes()
    end_of(s, "old")
    assert effect_of(s, Load).keys == save.keys


@pytest.mark.parametrize(("blocks", "host", "loaded"), [(2, 2, 2), (2, 1, 1), (1, 5, 1)])
def test_partial_save_is_loaded_and_rest_recomputed(blocks: int, host: int, loaded: int) -> None:
    s = scheduler(num_kv_blocks=10)
    young, save = preempted(s)
    end_of(s, "old")
    s.complete(Saved(save.operation, blocks, host=host))
    s.probe().pool.forget_prefixes()
    assert next_plan(s) is None
    load = effect_of(s, Load)
    assert load.keys == save.keys[:loaded]
    s.complete(Loaded(load.operation, loaded))
    assert planned(s).starts.tolist() == [4 * loaded]
    assert young.state is State.RUNNING


def test_failed_save_is_recomputed_without_lookup() -> None:
    s = scheduler(num_kv_blocks=10)
    young, save = preempted(s)
    end_of(s, "old")
    s.complete(Saved(save.operation, 0))
    s.probe().pool.forget_prefixes()
    assert planned(s).starts.tolist() == [0]
    assert (young.state, take_effects(s)) == (State.RUNNING, [])


def test_save_that_skipped_blocks_needs_a_lookup() -> None:
    """Blocks that the store is believed to hold are not saved again, so the completion does not locate them."""
    s = scheduler(OffloadSelection(preempted=True, finished=True, persist=True), num_kv_blocks=10)
    add(s, spec("before", 5, 1))
    s.complete(Found(effect_of(s, Lookup).operation, 0, 0))
    answer(s, planned(s))
    early = effect_of(s, Save)
    s.complete(Saved(early.operation, 1, host=1))
    young, save = preempted(s, stored=1)
    assert save.keys[0] not in early.keys
    end_of(s, "old")
    s.complete(Saved(save.operation, len(save.keys), host=len(save.keys)))
    s.probe().pool.forget_prefixes()
    assert next_plan(s) is None
    assert effect_of(s, Lookup).keys[:1] == early.keys
    assert young.state is State.WAITING


def test_abort_during_save_keeps_blocks_until_saved() -> None:
    s = scheduler(num_kv_blocks=10)
    _, save = preempted(s)
    end_of(s, "old")
    delta = s.abort("young")
    assert delta is not None
    assert delta.finish_reason is FinishReason.ABORT
    assert (len(s.probe().waiting), s.probe().pool.num_fenced) == (0, len(save.keys))
    assert s.has_work, "the save still reads the blocks"
    s.complete(Saved(save.operation, len(save.keys), host=len(save.keys)))
    assert (s.has_work, s.probe().pool.num_fenced) == (False, 0)
