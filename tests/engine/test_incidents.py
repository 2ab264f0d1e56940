"""Incidents that engines like this one had, replayed by name."""

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


def long_ones(count: int, max_tokens: int = 44) -> list[RequestSpec]:
    """Requests of which one alone nearly fills the pool of a small engine."""
    return [greedy(f"r{index}", PROMPTS[index][:8], max_tokens) for index in range(count)]


def pressed(specs: list[RequestSpec], k: int = 0, wrong: float = 0.0, **settings: int) -> Stepper:
    """A stepper that admits everybody at once."""
    stepper = Stepper(small_engine(specs, k, wrong, **settings), eager=True)
    stepper.submit(*specs)
    return stepper


def plan_until(stepper: Stepper, depth: int, state: State, request_id: str) -> None:
    """Step until a request is in `state`, with the plan that took it there and those before it in flight."""
    for _ in range(500):
        if stepper.state_of(request_id) is state:
            return
        if len(stepper.in_flight) >= depth or stepper.plan() is None:
            stepper.answer()
    pytest.fail(f"{request_id} never came to be {state.name}")


# A wholly preempted batch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.law("1.3")
def test_a_batch_that_is_preempted_as_a_whole_is_answered(depth: int) -> None:
    specs = long_ones(2)
    stepper = pressed(specs)
    empty: list[StepPlan] = []
    stepper.run(depth, watch=lambda plan: empty.append(plan) if plan.revocations and not len(plan.slots) else None)
    assert empty, "no step consisted of take-backs alone"
    assert stepper.texts.tokens == {spec.request_id: scripted(spec) for spec in specs}


def test_a_batch_that_is_aborted_as_a_whole_is_answered() -> None:
    stepper = pressed(long_ones(3))
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


# The same request preempted again and again --------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.law("1.1")
def test_a_request_preempted_repeatedly_with_outputs_in_flight_loses_nothing(k: int) -> None:
    specs = long_ones(4)
    stepper = pressed(specs, k, wrong=0.3)
    victims: Counter[str] = Counter()

    def watch(plan: StepPlan) -> None:
        stays = {
            (slot, gen)
            for earlier, _ in list(stepper.in_flight)[:-1]
            for slot, gen, samples in zip(
                earlier.slots.tolist(), earlier.gens.tolist(), earlier.samples.tolist(), strict=True
            )
            if samples
        }
        victims.update(stepper.request_in(back.slot) for back in plan.revocations if (back.slot, back.gen) in stays)

    stepper.run(3, watch=watch)
    assert max(victims.values()) >= 2, "nobody was preempted twice with outputs in flight"
    assert stepper.texts.tokens == {spec.request_id: scripted(spec) for spec in specs}


def test_what_was_in_flight_at_a_preemption_is_delivered_not_computed_again() -> None:
    stepper = pressed(long_ones(3))
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


# The last token in flight while draining -----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.law("1.6")
def test_a_text_that_ends_while_it_drains_is_not_requeued(depth: int) -> None:
    specs = long_ones(3)
    text = scripted(specs[2])
    probe = pressed(specs)
    plan_until(probe, depth, State.DRAINING, "r2")
    first_in_flight = len(probe.texts.tokens["r2"])
    assert text[first_in_flight] not in text[:first_in_flight]
    last = greedy("r2", specs[2].prompt, 44, stop_token_ids=(text[first_in_flight],))
    stepper = pressed([*specs[:2], last])
    plan_until(stepper, depth, State.DRAINING, "r2")
    stepper.answer()
    assert stepper.texts.ends == {"r2": FinishReason.STOP}
    assert int(stepper.probe.slots.draining.sum()) == 1, "the end was told, the slot follows on its -9"
    stepper.run(depth)
    assert stepper.texts.tokens["r2"] == text[: first_in_flight + 1]
    assert stepper.engine.stats().scheduler.outputs.finished[FinishReason.STOP] == 1


# Abort in each state ------------------------------------------------------------------------------------------


@pytest.mark.law("1.7")
def test_abort_while_waiting_leaves_at_once_and_is_never_prefilled() -> None:
    stepper = Stepper(small_engine([], max_num_seqs=1))
    stepper.submit(*long_ones(2))
    stepper.plan()
    stepper.abort("r1")
    assert stepper.texts.ends == {"r1": FinishReason.ABORT}
    stepper.run(2)
    assert stepper.engine.stats().scheduler.counters.prompt_tokens == 8


def test_abort_between_two_chunks_of_a_prompt_takes_the_slot_back() -> None:
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


def test_abort_while_running_delivers_what_was_in_flight_and_then_ends() -> None:
    stepper = Stepper(small_engine([]))
    stepper.submit(*long_ones(1))
    stepper.plan()
    stepper.plan()
    stepper.abort("r0")
    stepper.abort("r0")
    assert stepper.state_of("r0") is State.RUNNING
    stepper.run(3)
    assert stepper.texts.ends == {"r0": FinishReason.ABORT}
    assert stepper.texts.tokens["r0"] == scripted(long_ones(1)[0])[:2]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.law("1.7")
def test_abort_while_draining_ends_with_the_release_and_not_before(depth: int) -> None:
    specs = long_ones(3)
    stepper = pressed(specs)
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


def test_abort_of_a_preempted_request_that_waits_again_leaves_at_once() -> None:
    stepper = pressed(long_ones(3))
    plan_until(stepper, 2, State.DRAINING, "r2")
    while stepper.in_flight:
        stepper.answer()
    stepper.abort("r2")
    assert stepper.texts.ends["r2"] is FinishReason.ABORT
    stepper.run(2)


def test_abort_after_the_end_is_ignored() -> None:
    stepper = Stepper(small_engine([]))
    stepper.submit(greedy("r0", PROMPTS[0], 1))
    stepper.run(1)
    stepper.abort("r0")
    assert stepper.texts.ends == {"r0": FinishReason.LENGTH}


def test_a_prefill_that_leaves_lets_those_that_waited_for_its_prefix_in() -> None:
    stepper = Stepper(small_engine([], max_num_batched_tokens=4))
    stepper.submit(greedy("first", PROMPTS[0], 4), greedy("second", PROMPTS[0], 4))
    stepper.plan()
    stepper.abort("first")
    stepper.run(2)
    assert stepper.texts.tokens["second"] == scripted(greedy("second", PROMPTS[0], 4))


# A budget equal to the demand ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.law("2.1")
def test_a_budget_equal_to_the_decode_demand_serves_every_decode_with_all_its_drafts(k: int, depth: int) -> None:
    specs = [greedy(f"r{index}", PROMPTS[index][: 1 + k], 40) for index in range(4)]
    engine = small_engine(specs, k, num_kv_blocks=64, max_num_batched_tokens=4 * (1 + k))
    stepper = Stepper(engine)
    stepper.submit(*specs)
    stepper.run(depth)
    assert max(stepper.computed) == 4 * (1 + k)
    assert stepper.texts.tokens == golden(specs)


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.law("2.4")
def test_the_smallest_legal_budget_brings_everybody_to_the_end(k: int) -> None:
    specs = [greedy(f"r{index}", PROMPTS[index][:8], 20) for index in range(4)]
    stepper = pressed(specs, k, wrong=0.3, max_num_batched_tokens=1 + k)
    stepper.run(2)
    assert max(stepper.computed) == 1 + k
    assert stepper.texts.tokens == golden(specs)


# A victim whose blocks are fenced ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.law("3.4")
def test_one_victim_is_enough_while_its_blocks_are_fenced(depth: int) -> None:
    specs = long_ones(4)
    stepper = pressed(specs)
    plan_until_taken = 0
    while not plan_until_taken:
        if len(stepper.in_flight) >= depth or (plan := stepper.plan()) is None:
            stepper.answer()
        else:
            plan_until_taken = len(plan.revocations)
    assert plan_until_taken == 1
    given_up = stepper.probe.pool.num_fenced
    assert given_up > 1, "the victim was meant to give up more than the one block that was short"
    while stepper.probe.pool.num_fenced == given_up:
        plan = stepper.plan() if len(stepper.in_flight) < depth else None
        assert plan is None or not plan.revocations, "another victim although the first one's blocks come free"
        if plan is None:
            stepper.answer()
    stepper.run(depth)


def test_nobody_is_admitted_in_a_pass_that_preempted() -> None:
    specs = [*long_ones(3), *(greedy(f"short{index}", PROMPTS[index][:1], 1) for index in range(20))]
    stepper = pressed(specs, max_num_seqs=6)
    preempting: list[StepPlan] = []
    stepper.run(1, watch=lambda plan: preempting.append(plan) if plan.revocations else None)
    assert preempting
    assert not any(plan.admissions for plan in preempting)


# A device that stalls ------------------------------------------------------------------------------------------


@pytest.mark.law("1.8")
def test_a_step_that_is_not_answered_in_time_is_an_engine_fault() -> None:
    engine = null_engine(pipeline_depth=2, watchdog_seconds=0.1)
    go_on = threading.Event()
    engine.probe().runner.execute = lambda _: go_on.wait(5)  # type: ignore[method-assign,assignment,return-value]
    engine.submit(greedy("r0", PROMPTS[0], 4))
    try:
        with pytest.raises(EngineDead, match=r"not answered within 0\.1 s"):
            engine.step()
    finally:
        go_on.set()
        engine.close()


# A thousand requests -------------------------------------------------------------------------------------------


def test_a_thousand_requests_pass_through_a_pool_that_holds_five() -> None:
    sizes = np.random.default_rng(2).integers(1, 16, (1000, 2)).tolist()
    specs = [greedy(f"r{index}", PROMPTS[index][:prompt], out) for index, (prompt, out) in enumerate(sizes)]
    # Five requests of the mean size take half the pool each time they grow; sixteen slots want three times as much.
    stepper = Stepper(
        small_engine([], max_num_seqs=16, num_kv_blocks=20, max_model_len=32, max_num_batched_tokens=48), eager=True
    )
    stepper.submit(*specs)
    stepper.run(2)
    assert stepper.engine.stats().scheduler.counters.preemptions > 50
    assert stepper.texts.tokens == {spec.request_id: scripted(spec) for spec in specs}
    assert Counter(stepper.texts.ends.values()) == {FinishReason.LENGTH: 1000}
