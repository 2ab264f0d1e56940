"""An answer applies only if epoch, step and gen match, and a row's trouble is its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fd_core.scheduling.requests import State
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID, MalformedOutput
from fd_core.types import Delta, FinishReason, StepOutput, StepPlan
from tests.engine.stepping import Stepper, greedy, small_engine

NAMES = ["ends", "fails", "aborted", "goes on"]


def two_running() -> tuple[Stepper, StepPlan, StepOutput]:
    """Two requests, and the answer to the step that samples the first token of both."""
    stepper = Stepper(small_engine([]))
    stepper.submit(greedy("a", (1, 2, 3), 8), greedy("b", (4, 5, 6), 8))
    stepper.plan()
    plan, output = stepper.receive()
    return stepper, plan, output


def one_taken_back() -> tuple[Stepper, StepPlan, StepOutput]:
    """Request `a` aborted, and the answer to its take-back; `b` goes on."""
    stepper, plan, output = two_running()
    commit(stepper, plan, output)
    stepper.engine.abort(["a"])
    stepper.plan()
    plan, output = stepper.receive()
    return stepper, plan, output


def commit(stepper: Stepper, plan: StepPlan, output: StepOutput) -> list[Delta]:
    return stepper.scheduler.commit(plan, output)[0]


def names(deltas: list[Delta]) -> set[str]:
    return {delta.request_id for delta in deltas}


@pytest.mark.parametrize("change", [{"epoch": 2}, {"step": 5}, {"step": -1}])
@pytest.mark.law("1.5")
def test_an_answer_of_another_epoch_or_step_is_dropped_whole(change: dict[str, int]) -> None:
    stepper, plan, output = two_running()
    assert commit(stepper, plan, dataclasses.replace(output, **change)) == []
    assert stepper.scheduler.stats().outputs.stale_outputs == 1
    assert names(commit(stepper, plan, output)) == {"a", "b"}


def test_an_answer_applies_once() -> None:
    stepper, plan, output = two_running()
    commit(stepper, plan, output)
    assert commit(stepper, plan, output) == []
    assert stepper.scheduler.stats().outputs.stale_outputs == 1


def test_answers_apply_in_the_order_of_their_steps() -> None:
    stepper, plan, output = two_running()
    stepper.plan()
    later = stepper.receive()
    assert commit(stepper, *later) == []
    assert names(commit(stepper, plan, output)) == {"a", "b"}


@pytest.mark.law("1.5")
def test_a_row_of_another_gen_is_dropped_and_counted() -> None:
    stepper, plan, output = two_running()
    gens = output.gens.copy()
    gens[plan.slots[0]] += 1
    assert names(commit(stepper, plan, dataclasses.replace(output, gens=gens))) == {"b"}
    assert stepper.scheduler.stats().outputs.stale_outputs == 1


def test_a_row_of_a_stay_that_ended_is_not_the_next_ones() -> None:
    """EOS comes while the next step is in flight: its row belongs to nobody, not to whoever has the slot by then."""
    stepper = Stepper(small_engine([], max_num_seqs=1))
    stepper.submit(greedy("a", (1, 2, 3), 8, stop_token_ids=tuple(range(257))), greedy("b", (9, 9), 2))
    stepper.plan()
    stepper.plan()
    stepper.answer()
    assert stepper.texts.ends == {"a": FinishReason.STOP}
    assert stepper.plan() is not None, "b has the slot while a row of a is still in flight"
    stepper.answer()
    assert "b" not in stepper.texts.tokens
    assert stepper.scheduler.stats().outputs.overrun_rows == 1
    stepper.run(2)
    assert len(stepper.texts.tokens["b"]) == 2


def test_an_error_ends_its_own_request_only() -> None:
    stepper, plan, output = two_running()
    failed = dataclasses.replace(output, errors=((int(plan.slots[0]), "numbers overflowed"),))
    deltas = {delta.request_id: delta for delta in commit(stepper, plan, failed)}
    assert (deltas["a"].finish_reason, deltas["a"].error) == (FinishReason.ERROR, "numbers overflowed")
    assert (deltas["b"].finish_reason, len(deltas["b"].token_ids)) == (None, 1)
    stepper.audit()


def test_an_error_beside_a_revocation_hides_neither() -> None:
    stepper, plan, output = one_taken_back()
    failed = dataclasses.replace(output, errors=((int(plan.slots[0]), "numbers overflowed"),))
    deltas = {delta.request_id: delta for delta in commit(stepper, plan, failed)}
    assert {name: delta.finish_reason for name, delta in deltas.items()} == {
        "a": FinishReason.ABORT,
        "b": FinishReason.ERROR,
    }
    assert not stepper.engine.has_work
    stepper.check_idle()


@pytest.mark.law("1.3")
def test_an_error_of_a_revoked_slot_does_not_hide_its_release() -> None:
    stepper, plan, output = one_taken_back()
    failed = dataclasses.replace(output, errors=((plan.revocations[0].slot, "numbers overflowed"),))
    deltas = {delta.request_id: delta.finish_reason for delta in commit(stepper, plan, failed)}
    assert deltas == {"a": FinishReason.ABORT, "b": None}
    assert stepper.state_of("a") is None
    assert not stepper.probe.slots.draining.any()


def test_an_error_of_a_row_in_flight_ends_a_revoked_request_once_and_its_slot_follows() -> None:
    stepper = Stepper(small_engine([], pipeline_depth=2))
    stepper.submit(greedy("a", (1, 2, 3), 8), greedy("b", (4, 5, 6), 8))
    stepper.plan()
    plan, output = stepper.receive()
    stepper.engine.abort(["a"])
    stepper.plan()
    revoking, release = stepper.receive()
    failed = dataclasses.replace(output, errors=((0, "numbers overflowed"),))
    first = commit(stepper, plan, failed)
    assert {delta.request_id: delta.finish_reason for delta in first} == {"a": FinishReason.ERROR, "b": None}
    assert stepper.probe.slots.draining.tolist()[0], "the slot follows on its release"
    assert names(commit(stepper, revoking, release)) == {"b"}
    assert not stepper.probe.slots.draining.any()
    stepper.audit()


def test_an_answer_holds_one_delta_for_each_request() -> None:
    """Last tokens, an error, an abort and a text that goes on, in one answer."""
    stepper = Stepper(small_engine([]))
    stepper.submit(*(greedy(name, (index, 2, 3), 1 if name == "ends" else 8) for index, name in enumerate(NAMES)))
    stepper.plan()
    plan, output = stepper.receive()
    failed = dataclasses.replace(output, errors=((NAMES.index("fails"), "numbers overflowed"),))
    deltas = commit(stepper, plan, failed)
    assert sorted(delta.request_id for delta in deltas) == sorted(NAMES)
    stepper.engine.abort(["aborted"])
    stepper.plan()
    plan, output = stepper.receive()
    deltas = commit(stepper, plan, output)
    assert sorted((delta.request_id, delta.finish_reason) for delta in deltas) == [
        ("aborted", FinishReason.ABORT),
        ("goes on", None),
    ]


def test_a_take_back_without_its_release_is_a_fault() -> None:
    stepper, plan, output = one_taken_back()
    tokens = output.tokens.copy()
    tokens[plan.revocations[0].slot, 0] = EMPTY_TOKEN_ID
    with pytest.raises(MalformedOutput, match=r"stops slots \[0\].*acknowledges \[\]"):
        commit(stepper, plan, dataclasses.replace(output, tokens=tokens))


@pytest.mark.law("1.2")
def test_a_release_that_nobody_asked_for_is_a_fault() -> None:
    stepper, plan, output = one_taken_back()
    tokens = output.tokens.copy()
    tokens[3, 0] = PREEMPTED_TOKEN_ID
    with pytest.raises(MalformedOutput, match=r"acknowledges \[0, 3\]"):
        commit(stepper, plan, dataclasses.replace(output, tokens=tokens))


@pytest.mark.law("1.2")
def test_a_release_of_another_gen_leaves_the_slot_draining() -> None:
    stepper, plan, output = one_taken_back()
    gens = output.gens.copy()
    gens[plan.revocations[0].slot] -= 1
    assert names(commit(stepper, plan, dataclasses.replace(output, gens=gens))) == {"b"}
    assert stepper.state_of("a") is State.DRAINING
    assert stepper.scheduler.stats().outputs.stale_outputs == 1


def test_tokens_of_a_row_that_samples_nothing_are_a_fault() -> None:
    stepper = Stepper(small_engine([], max_num_batched_tokens=4))
    stepper.submit(greedy("a", range(12), 4))
    stepper.plan()
    plan, output = stepper.receive()
    tokens = np.where(output.tokens < 0, 7, output.tokens).astype(np.int32)
    with pytest.raises(MalformedOutput, match="no row of the step samples"):
        commit(stepper, plan, dataclasses.replace(output, tokens=tokens))
