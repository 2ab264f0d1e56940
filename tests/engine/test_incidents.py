"""Regression tests for incidents known from engines of this kind."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest

from fd_core.errors import EngineDead
from fd_core.scheduling.requests import State
from fd_core.types import FinishReason, RequestSpec, StepPlan
from tests.engine.helpers import golden, null_engine
from tests.engine.stepping import Stepper, greedy, scripted, small_engine

PROMPTS = np.random.default_rng(1).integers(0, 256, (1000, 16)).tolist()


def long_requests(count: int, max_tokens: int = 44) -> list[RequestSpec]:
    """Requests that nearly fill the pool of a small engine each."""
    return [greedy(f"r{index}", PROMPTS[index][:8], max_tokens) for index in range(count)]


def overcommitted(specs: list[RequestSpec], k: int = 0, wrong: float = 0.0, **settings: int) -> Stepper:
    """Return a stepper that admits all requests at once."""
    stepper = Stepper(small_engine(specs, k, wrong, **settings), eager=True)
    stepper.submit(*specs)
    return stepper


def plan_until(stepper: Stepper, depth: int, state: State, request_id: str) -> None:
    """Step until a request is in `state`; return the plan that caused it and those in flight before it."""
    for _ in range(500):
        if stepper.state_of(request_id) is state:
            return
        if len(stepper.in_flight) >= depth or stepper.plan() is None:
            stepper.answer()
    pytest.fail(f"{request_id} never reached state {state.name}")


# Preemption of a whole batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.law("1.3")
def test_fully_preempted_batch_is_acknowledged(depth: int) -> None:
    specs = long_requests(2)
    stepper = overcommitted(specs)
    empty: list[StepPlan] = []
    stepper.run(depth, watch=lambda plan: empty.append(plan) if plan.revocations and not len(plan.slots) else None)
    assert empty, "no step consisted of preemptions alone"
    assert stepper.texts.tokens == {spec.request_id: scripted(spec) for spec in specs}


def test_fully_aborted_batch_is_acknowledged() -> None:
    stepper = overcommitted(long_requests(3))
    stepper.plan()
    stepper.answer()
    for name in ("r0", "r1", "r2"):
        stepper.abort(name)
    plan = stepper.plan()
    assert plan is not None
    assert (len(plan.revocations), len(plan.slots)) == (3, 0)
    stepper.answer()
    assert set(stepper.texts.ends.values()) == {FinishReason.ABORT}
    stepper.check_idle()


# Repeated preemption of one request ----------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.law("1.1")
def test_repeated_preemption_with_outputs_in_flight_loses_no_token(k: int) -> None:
    specs = long_requests(4)
    stepper = overcommitted(specs, k, wrong=0.3)
    victims: Counter[str] = Counter()

    def watch(plan: StepPlan) -> None:
        occupied = {
            (slot, gen)
            for earlier, _ in list(stepper.in_flight)[:-1]
            for slot, gen, samples in zip(
                earlier.slots.tolist(), earlier.gens.tolist(), earlier.samples.tolist(), strict=True
            )
            if samples
        }
        victims.update(stepper.request_in(back.slot) for back in plan.revocations if (back.slot, back.gen) in occupied)

    stepper.run(3, watch=watch)
    assert max(victims.values()) >= 2, "no request was preempted twice with outputs in flight"
    assert stepper.texts.tokens == {spec.request_id: scripted(spec) for spec in specs}


def test_tokens_in_flight_at_preemption_are_delivered() -> None:
    stepper = overcommitted(long_requests(3))
    plan_until(stepper, 3, State.DRAINING, "r2")
    slot = next(plan.revocations[0].slot for plan, _ in stepper.in_flight if plan.revocations)
    promised = sum(
        int(plan.samples[plan.slots == slot].sum()) for plan, _ in stepper.in_flight if slot in plan.slots.tolist()
    )
    before = len(stepper.texts.tokens["r2"])
    while stepper.in_flight:
        stepper.answer()
    assert promised > 0
    assert len(stepper.texts.tokens["r2"]) == before + promised
    assert stepper.state_of("r2") is State.WAITING


# Last token in flight while draining ---------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.law("1.6")
def test_text_that_ends_while_draining_is_not_requeued(depth: int) -> None:
    specs = long_requests(3)
    text = scripted(specs[2])
    probe = overcommitted(specs)
    plan_until(probe, depth, State.DRAINING, "r2")
    first_in_flight = len(probe.texts.tokens["r2"])
    assert text[first_in_flight] not in text[:first_in_flight]
    last = greedy("r2", specs[2].prompt, 44, stop_token_ids=(text[first_in_flight],))
    stepper = overcommitted([*specs[:2], last])
    plan_until(stepper, depth, State.DRAINING, "r2")
    stepper.answer()
    assert stepper.texts.ends == {"r2": FinishReason.STOP}
    assert int(stepper.probe.slots.draining.sum()) == 1, "the end was delivered; the -9 frees the slot"
    stepper.run(depth)
    assert stepper.texts.tokens["r2"] == text[: first_in_flight + 1]
    assert stepper.engine.stats().scheduler.outputs.finished[FinishReason.STOP] == 1


# Abort in each state ------------------------------------------------------------------------------------------


@pytest.mark.law("1.7")
def test_abort_while_waiting_removes_request_without_prefill() -> None:
    stepper = Stepper(small_engine([], max_num_seqs=1))
    stepper.submit(*long_requests(2))
    stepper.plan()
    stepper.abort("r1")
    assert stepper.texts.ends == {"r1": FinishReason.ABORT}
    stepper.run(2)
    assert stepper.engine.stats().scheduler.counters.prompt_tokens == 8


def test_abort_between_prefill_chunks_frees_slot() -> None:
    stepper = Stepper(small_engine([], max_num_batched_tokens=4))
    stepper.submit(greedy("r0", PROMPTS[0], 4))
    stepper.plan()
    stepper.abort("r0")
    plan = stepper.plan()
    assert plan is not None
    assert (len(plan.revocations), plan.total_tokens) == (1, 0)
    assert not stepper.texts.ends
    stepper.run(2)
    assert (stepper.texts.ends, stepper.texts.tokens) == ({"r0": FinishReason.ABORT}, {"r0": []})


def test_abort_while_running_delivers_tokens_in_flight() -> None:
    stepper = Stepper(small_engine([]))
    stepper.submit(*long_requests(1))
    stepper.plan()
    stepper.plan()
    stepper.abort("r0")
    stepper.abort("r0")
    assert stepper.state_of("r0") is State.RUNNING
    stepper.run(3)
    assert stepper.texts.ends == {"r0": FinishReason.ABORT}
    assert stepper.texts.tokens["r0"] == scripted(long_requests(1)[0])[:2]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.law("1.7")
def test_abort_while_draining_ends_on_release(depth: int) -> None:
    specs = long_requests(3)
    stepper = overcommitted(specs)
    plan_until(stepper, depth, State.DRAINING, "r2")
    stepper.abort("r2")
    stepper.abort("r2")
    assert stepper.state_of("r2") is State.DRAINING
    assert "r2" not in stepper.texts.ends
    while stepper.in_flight:
        stepper.answer()
    assert stepper.texts.ends["r2"] is FinishReason.ABORT
    stepper.run(depth)
    assert [stepper.texts.tokens[spec.request_id] for spec in specs[:2]] == [scripted(spec) for spec in specs[:2]]


def test_abort_of_requeued_request_ends_immediately() -> None:
    stepper = overcommitted(long_requests(3))
    plan_until(stepper, 2, State.DRAINING, "r2")
    while stepper.in_flight:
        stepper.answer()
    stepper.abort("r2")
    assert stepper.texts.ends["r2"] is FinishReason.ABORT
    stepper.run(2)


def test_abort_after_finish_is_ignored() -> None:
    stepper = Stepper(small_engine([]))
    stepper.submit(greedy("r0", PROMPTS[0], 1))
    stepper.run(1)
    stepper.abort("r0")
    assert stepper.texts.ends == {"r0": FinishReason.LENGTH}


def test_aborted_prefill_unblocks_requests_waiting_for_its_prefix() -> None:
    stepper = Stepper(small_engine([], max_num_batched_tokens=4))
    stepper.submit(greedy("first", PROMPTS[0], 4), greedy("second", PROMPTS[0], 4))
    stepper.plan()
    stepper.abort("first")
    stepper.run(2)
    assert stepper.texts.tokens["second"] == scripted(greedy("second", PROMPTS[0], 4))


# Token budget equal to demand ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.law("2.1")
def test_budget_equal_to_decode_demand_keeps_all_drafts(k: int, depth: int) -> None:
    specs = [greedy(f"r{index}", PROMPTS[index][: 1 + k], 40) for index in range(4)]
    engine = small_engine(specs, k, num_kv_blocks=64, max_num_batched_tokens=4 * (1 + k))
    stepper = Stepper(engine)
    stepper.submit(*specs)
    stepper.run(depth)
    assert max(stepper.computed) == 4 * (1 + k)
    assert stepper.texts.tokens == golden(specs)


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.law("2.4")
def test_smallest_legal_budget_finishes_all_requests(k: int) -> None:
    specs = [greedy(f"r{index}", PROMPTS[index][:8], 20) for index in range(4)]
    stepper = overcommitted(specs, k, wrong=0.3, max_num_batched_tokens=1 + k)
    stepper.run(2)
    assert max(stepper.computed) == 1 + k
    assert stepper.texts.tokens == golden(specs)


# Victim with fenced blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.law("3.4")
def test_fenced_blocks_of_victim_prevent_second_preemption(depth: int) -> None:
    specs = long_requests(4)
    stepper = overcommitted(specs)
    plan_until_taken = 0
    while not plan_until_taken:
        if len(stepper.in_flight) >= depth or (plan := stepper.plan()) is None:
            stepper.answer()
        else:
            plan_until_taken = len(plan.revocations)
    assert plan_until_taken == 1
    given_up = stepper.probe.pool.num_fenced
    assert given_up > 1, "the victim should free more than the one missing block"
    while stepper.probe.pool.num_fenced == given_up:
        plan = stepper.plan() if len(stepper.in_flight) < depth else None
        assert plan is None or not plan.revocations, "second victim although the first one's blocks will be freed"
        if plan is None:
            stepper.answer()
    stepper.run(depth)


def test_no_admission_in_a_pass_that_preempted() -> None:
    specs = [*long_requests(3), *(greedy(f"short{index}", PROMPTS[index][:1], 1) for index in range(20))]
    stepper = overcommitted(specs, max_num_seqs=6)
    preempting: list[StepPlan] = []
    stepper.run(1, watch=lambda plan: preempting.append(plan) if plan.revocations else None)
    assert preempting
    assert not any(plan.admissions for plan in preempting)


# Stalled device ------------------------------------------------------------------------------------------------


@pytest.mark.law("1.8")
def test_step_timeout_is_an_engine_fault() -> None:
    engine = null_engine(pipeline_depth=2, watchdog_seconds=0.1)
    go_on = threading.Event()
    engine.probe().runner.execute = lambda _: go_on.wait(60)  # type: ignore[method-assign,assignment,return-value]
    engine.submit(greedy("r0", PROMPTS[0], 4))
    try:
        with pytest.raises(EngineDead, match=r"did not complete within 0\.1 s"):
            engine.step()
    finally:
        go_on.set()
        engine.close()


# Many requests in a small pool ---------------------------------------------------------------------------------


def test_thousand_requests_finish_in_pool_for_five() -> None:
    sizes = np.random.default_rng(2).integers(1, 16, (1000, 2)).tolist()
    specs = [greedy(f"r{index}", PROMPTS[index][:prompt], out) for index, (prompt, out) in enumerate(sizes)]
    # Five requests of mean size fill half the pool as they grow; sixteen slots need three times as much.
    stepper = Stepper(
        small_engine([], max_num_seqs=16, num_kv_blocks=20, max_model_len=32, max_num_batched_tokens=48), eager=True
    )
    stepper.submit(*specs)
    stepper.run(2)
    assert stepper.engine.stats().scheduler.counters.preemptions > 50
    assert stepper.texts.tokens == {spec.request_id: scripted(spec) for spec in specs}
    assert Counter(stepper.texts.ends.values()) == {FinishReason.LENGTH: 1000}
