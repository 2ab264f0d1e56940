"""KV offload: load or recompute, and exclusive ownership of blocks during copies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fd_core.effects.operations import Found, Load, Lookup, Save
from fd_core.scheduling.operations.kv_offloading import Pace
from fd_core.scheduling.requests import State
from fd_core.types import FinishReason, RequestSpec
from tests.engine.helpers import golden
from tests.engine.stepping import How, Stepper, greedy, small_engine
from tests.engine.stored import ScriptedTiers, keep_kv

LONG = greedy("long", range(40), 20)
OTHER = greedy("other", range(60, 100), 20)


def stepper_with_tiers(*specs: RequestSpec, blocks: int = 16, **keep: bool) -> tuple[Stepper, ScriptedTiers]:
    stepper = Stepper(small_engine(list(specs), num_kv_blocks=blocks), eager=True)
    return stepper, keep_kv(stepper, **keep)


def preempt(stepper: Stepper, name: str) -> None:
    """Preempt a running request as if blocks had run out, and commit until it waits again."""
    pool = stepper.probe.pool
    slot = stepper.probe.requests[name].slot
    assert slot is not None
    stepper.scheduler._planner._choose_victim = lambda: slot  # type: ignore[method-assign]  # override
    hostage = pool.allocate(pool.num_free)
    assert hostage is not None
    while stepper.state_of(name) is State.RUNNING:
        stepper_audit, stepper.audit = stepper.audit, lambda: None  # type: ignore[method-assign]  # a foreign owner
        try:
            stepper.plan()
            stepper.answer()
        finally:
            stepper.audit = stepper_audit  # type: ignore[method-assign]
    pool.release(hostage, -1)
    assert stepper.state_of(name) is State.WAITING


def start(stepper: Stepper, tiers: ScriptedTiers, spec: RequestSpec, steps: int = 6) -> None:
    stepper.submit(spec)
    finish_all(stepper, tiers)
    for _ in range(steps):
        stepper.plan()
        finish_all(stepper, tiers)
        if stepper.in_flight:
            stepper.answer()


def finish_all(stepper: Stepper, tiers: ScriptedTiers, how: How = How.WELL) -> None:
    stepper.flush()
    while tiers.pending:
        stepper.complete(0, how)


@pytest.mark.parametrize(("how", "loads_something"), [(How.WELL, True), (How.IN_PART, True), (How.BADLY, False)])
@pytest.mark.law("5.2")
def test_preempted_request_resumes_from_loaded_blocks(how: How, loads_something: bool) -> None:
    stepper, tiers = stepper_with_tiers(LONG)
    start(stepper, tiers, LONG)
    preempt(stepper, "long")
    assert any(isinstance(operation, Save) for operation in tiers.pending)
    stepper.probe.pool.forget_prefixes()
    finish_all(stepper, tiers)
    stepper.probe.pool.forget_prefixes()
    stepper.plan()
    assert stepper.state_of("long") is State.LOADING
    assert int(stepper.probe.slots.loading.sum()) == 1
    finish_all(stepper, tiers, how)
    assert stepper.state_of("long") is State.RUNNING
    counters = stepper.probe.offloading.counters
    assert (counters.loaded_tokens > 0) == loads_something
    assert stepper.run(1).tokens == golden([LONG])
    assert stepper.probe.running_batch.counters.recomputed_tokens < 60 - counters.loaded_tokens


@pytest.mark.law("3.2")
def test_blocks_of_victim_stay_fenced_until_saved() -> None:
    stepper, tiers = stepper_with_tiers(LONG)
    start(stepper, tiers, LONG)
    preempt(stepper, "long")
    save = next(operation for operation in tiers.pending if isinstance(operation, Save))
    pool = stepper.probe.pool
    assert pool.num_fenced == len(save.blocks)
    assert len(pool.match(save.keys)) == len(save.keys), "reads do not block other requests with the same prefix"
    stepper.complete(tiers.pending.index(save), How.WELL)
    assert pool.num_fenced == 0
    assert len(pool.match(save.keys)) == len(save.keys)


def test_abort_while_loading_ends_request_and_fences_blocks() -> None:
    stepper, tiers = stepper_with_tiers(LONG, OTHER)
    start(stepper, tiers, LONG)
    preempt(stepper, "long")
    finish_all(stepper, tiers)
    stepper.probe.pool.forget_prefixes()
    stepper.plan()
    assert stepper.state_of("long") is State.LOADING
    stepper.abort("long")
    stepper.flush()
    assert stepper.texts.ends["long"] is FinishReason.ABORT
    (load,) = tiers.pending
    assert isinstance(load, Load)
    assert load.operation in tiers.cancelled
    assert stepper.probe.pool.num_fenced == len(load.blocks)
    stepper.submit(OTHER)
    stepper.flush()
    lookup = next(operation for operation in tiers.pending if isinstance(operation, Lookup))
    stepper.complete(tiers.pending.index(lookup), How.WELL)
    for _ in range(4):
        stepper.plan()
        if stepper.in_flight:
            stepper.answer()
    # The load writes its blocks only now and would corrupt any request that got them meanwhile.
    stepper.complete(tiers.pending.index(load), How.IN_PART)
    assert stepper.run(1).tokens["other"] == golden([OTHER])["other"]


def test_request_awaiting_lookup_does_not_block_others() -> None:
    stepper, tiers = stepper_with_tiers(LONG, OTHER)
    stepper.submit(LONG, greedy("short", [1, 2], 3))
    stepper.plan()
    assert stepper.state_of("long") is State.WAITING
    assert stepper.state_of("short") is State.RUNNING, "no lookup for a prompt shorter than one block"
    (lookup,) = tiers.pending
    stepper.scheduler.complete(Found(lookup.operation, 0, 0))
    tiers.pending.clear()
    stepper.plan()
    assert stepper.state_of("long") is State.RUNNING


@pytest.mark.law("5.6")
def test_slow_load_is_skipped_and_retried_at_the_end() -> None:
    stepper, tiers = stepper_with_tiers(LONG)
    offloading = stepper.probe.offloading
    offloading.load_or_recompute.pace = Pace(prefill_token=1e-6, host_block=1e-3, store_block=1e-3)
    start(stepper, tiers, LONG)
    request = stepper.probe.requests["long"]
    request.stored, request.stored_on_host = 9, 3
    declined = 0
    while not offloading.worth_loading(request, 0, 9):
        declined += 1
        assert declined < 200
    assert declined > 1
    _, decisions = stepper.probe.operations.take()
    assert decisions[0].load_seconds == pytest.approx(9e-3)
    assert decisions[0].recompute_seconds == pytest.approx(36e-6)
    assert [decision.load for decision in decisions] == [False] * declined + [True]
    assert offloading.counters.declined == declined


def test_finished_prompt_is_loaded_by_another_engine() -> None:
    first, tiers = stepper_with_tiers(LONG, finished=True, persist=True)
    start(first, tiers, LONG)
    first.run(1)
    assert tiers.values
    second, other_tiers = stepper_with_tiers(LONG, finished=True, persist=True)
    second.probe.prefixes.hasher = first.probe.prefixes.hasher
    other_tiers.values = tiers.values
    start(second, other_tiers, LONG)
    assert second.probe.requests["long"].cached_tokens == 36
    assert second.run(1).tokens == golden([LONG])


def test_stored_blocks_are_saved_again_only_after_lookup_miss() -> None:
    stepper, _ = stepper_with_tiers(LONG, finished=True, persist=True)
    offloading = stepper.probe.offloading
    blocks = stepper.probe.pool.allocate(3)
    assert blocks is not None
    keys = [b"a", b"b", b"c"]
    operations = stepper.probe.operations
    (lookup_effect,) = stepper.scheduler.add(LONG).operations
    request = stepper.probe.requests["long"]
    offloading.found(Found(lookup_effect.operation, 0, 0))  # type: ignore[union-attr]  # a lookup
    request.chain[:] = keys
    assert offloading.save(request, blocks[None], 3) is not None
    assert offloading.save(request, blocks[None], 3) is None
    assert [len(effect.keys) for effect in operations.take()[0] if isinstance(effect, Save)] == [3]
    request.lookup_issued = False
    offloading.start_lookup(request, keys)
    (lookup_effect,), _ = operations.take()
    offloading.found(Found(lookup_effect.operation, 0, 1))  # type: ignore[union-attr]  # a lookup
    offloading.save(request, blocks[None], 3)
    (again,), _ = operations.take()
    assert isinstance(again, Save)
    assert again.keys == (b"b", b"c")
    assert np.array_equal(again.blocks, blocks[1:])


@pytest.mark.law("1.4")
def test_loading_requests_count_towards_max_num_seqs() -> None:
    specs = [greedy(f"r{index}", range(index, index + 9), 6) for index in range(6)]
    stepper, tiers = stepper_with_tiers(*specs, blocks=40, finished=True)
    stepper._ways = itertools.cycle([How.WELL])
    for spec in specs:
        start(stepper, tiers, spec, steps=0)
    stepper.run(1)
    stepper.probe.pool.forget_prefixes()
    again = [greedy(f"a{index}", spec.prompt, 6) for index, spec in enumerate(specs)]
    stepper.submit(*again)
    stepper.flush()
    for _ in range(len(again)):
        stepper.complete(0, How.WELL)
    stepper.plan()
    assert int(stepper.probe.slots.loading.sum()) == 4
    assert stepper.run(1).tokens == golden([*specs, *again])


@pytest.mark.law("3.5")
def test_only_settled_blocks_of_victim_are_saved() -> None:
    stepper, tiers = stepper_with_tiers(LONG)
    stepper.submit(LONG)
    finish_all(stepper, tiers)
    stepper.plan()
    assert stepper.state_of("long") is State.RUNNING
    slot = stepper.probe.requests["long"].slot
    assert slot is not None
    assert stepper.probe.slots.num_registered[slot] < stepper.probe.slots.num_blocks[slot], "a prefill is in flight"
    request, offloading, slots = stepper.probe.requests["long"], stepper.probe.offloading, stepper.probe.slots
    assert offloading.save(request, slots.tables[:, slot], int(slots.num_registered[slot])) is None
    stepper.answer()
    preempt(stepper, "long")
    (saved,) = (operation for operation in tiers.pending if isinstance(operation, Save))
    assert len(saved.keys) == slots.num_registered[slot] > 0


@pytest.mark.parametrize("salts", [("", "another"), ("tenant-1", "tenant-2"), ("a", "ab")])
@pytest.mark.law("5.3")
def test_prefix_is_not_loaded_under_another_salt(salts: tuple[str, str]) -> None:
    stored = greedy("long", LONG.prompt, 30, cache_salt=salts[0])
    stepper, tiers = stepper_with_tiers(stored, finished=True, persist=True)
    start(stepper, tiers, stored)
    stepper.run(1)
    stepper.probe.pool.forget_prefixes()
    stepper.submit(greedy("other tenant", LONG.prompt, 3, cache_salt=salts[1]))
    stepper.flush()
    (lookup,) = tiers.pending
    assert isinstance(lookup, Lookup)
    assert tiers.values
    assert not set(lookup.keys) & set(tiers.values)
    finish_all(stepper, tiers)
    stepper.plan()
    assert int(stepper.probe.slots.loading.sum()) == 0
    assert stepper.probe.requests["other tenant"].cached_tokens == 0


def test_lookup_result_does_not_revive_aborted_request() -> None:
    stepper, tiers = stepper_with_tiers(LONG, OTHER)
    stepper.submit(LONG)
    stepper.flush()
    (lookup,) = tiers.pending
    stepper.abort("long")
    stepper.flush()
    assert lookup.operation in tiers.cancelled
    assert stepper.texts.ends["long"] is FinishReason.ABORT
    finish_all(stepper, tiers)
    stepper.plan()
    assert int(stepper.probe.slots.running.sum()) == 0
    assert stepper.run(1).tokens.get("long", []) == []
