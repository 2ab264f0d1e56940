"""An output applies only if epoch, step and gen match, and row errors stay isolated."""

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
    """Return two requests and the output of the step that samples the first token of both."""
    stepper = Stepper(small_engine([]))
    stepper.submit(greedy("a", (1, 2, 3), 8), greedy("b", (4, 5, 6), 8))
    stepper.plan()
    plan, output = stepper.receive()
    return stepper, plan, output


def one_preempted() -> tuple[Stepper, StepPlan, StepOutput]:
    """Return request `a` aborted and the output with its preemption acknowledgement; `b` continues."""
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
def test_output_of_other_epoch_or_step_is_dropped(change: dict[str, int]) -> None:
    stepper, plan, output = two_running()
    assert commit(stepper, plan, dataclasses.replace(output, **change)) == []
    assert stepper.scheduler.stats().outputs.stale_outputs == 1
    assert names(commit(stepper, plan, output)) == {"a", "b"}


def test_output_applies_once() -> None:
    stepper, plan, output = two_running()
    commit(stepper, plan, output)
    assert commit(stepper, plan, output) == []
    assert stepper.scheduler.stats().outputs.stale_outputs == 1


def test_outputs_apply_in_step_order() -> None:
    stepper, plan, output = two_running()
    stepper.plan()
    later = stepper.receive()
    assert commit(stepper, *later) == []
    assert names(commit(stepper, plan, output)) == {"a", "b"}


@pytest.mark.law("1.5")
def test_row_of_other_gen_is_dropped_and_counted() -> None:
    stepper, plan, output = two_running()
    gens = output.gens.copy()
    gens[plan.slots[0]] += 1
    assert names(commit(stepper, plan, dataclasses.replace(output, gens=gens))) == {"b"}
    assert stepper.scheduler.stats().outputs.stale_outputs == 1


def test_row_in_flight_does_not_reach_next_request_in_slot() -> None:
    """EOS arrives while the next step is in flight: its row is dropped, not delivered to the slot's new request."""
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


def test_row_error_ends_only_its_request() -> None:
    stepper, plan, output = two_running()
    failed = dataclasses.replace(output, errors=((int(plan.slots[0]), "numbers overflowed"),))
    deltas = {delta.request_id: delta for delta in commit(stepper, plan, failed)}
    assert (deltas["a"].finish_reason, deltas["a"].error) == (FinishReason.ERROR, "numbers overflowed")
    assert (deltas["b"].finish_reason, len(deltas["b"].token_ids)) == (None, 1)
    stepper.audit()


def test_error_and_preemption_in_one_step_both_apply() -> None:
    stepper, plan, output = one_preempted()
    failed = dataclasses.replace(output, errors=((int(plan.slots[0]), "numbers overflowed"),))
    deltas = {delta.request_id: delta for delta in commit(stepper, plan, failed)}
    assert {name: delta.finish_reason for name, delta in deltas.items()} == {
        "a": FinishReason.ABORT,
        "b": FinishReason.ERROR,
    }
    assert not stepper.engine.has_work
    stepper.check_idle()


@pytest.mark.law("1.3")
def test_error_of_preempted_slot_does_not_hide_its_release() -> None:
    stepper, plan, output = one_preempted()
    failed = dataclasses.replace(output, errors=((plan.revocations[0].slot, "numbers overflowed"),))
    deltas = {delta.request_id: delta.finish_reason for delta in commit(stepper, plan, failed)}
    assert deltas == {"a": FinishReason.ABORT, "b": None}
    assert stepper.state_of("a") is None
    assert not stepper.probe.slots.draining.any()


def test_row_error_in_flight_ends_preempted_request_once() -> None:
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
    assert stepper.probe.slots.draining.tolist()[0], "the release frees the slot"
    assert names(commit(stepper, revoking, release)) == {"b"}
    assert not stepper.probe.slots.draining.any()
    stepper.audit()


def test_output_yields_one_delta_per_request() -> None:
    """Last tokens, an error, an abort and an unfinished text in one output."""
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


def test_preemption_without_release_is_a_fault() -> None:
    stepper, plan, output = one_preempted()
    tokens = output.tokens.copy()
    tokens[plan.revocations[0].slot, 0] = EMPTY_TOKEN_ID
    with pytest.raises(MalformedOutput, match=r"stops slots \[0\].*acknowledges \[\]"):
        commit(stepper, plan, dataclasses.replace(output, tokens=tokens))


@pytest.mark.law("1.2")
def test_unexpected_release_is_a_fault() -> None:
    stepper, plan, output = one_preempted()
    tokens = output.tokens.copy()
    tokens[3, 0] = PREEMPTED_TOKEN_ID
    with pytest.raises(MalformedOutput, match=r"acknowledges \[0, 3\]"):
        commit(stepper, plan, dataclasses.replace(output, tokens=tokens))


@pytest.mark.law("1.2")
def test_release_of_other_gen_leaves_slot_draining() -> None:
    stepper, plan, output = one_preempted()
    gens = output.gens.copy()
    gens[plan.revocations[0].slot] -= 1
    assert names(commit(stepper, plan, dataclasses.replace(output, gens=gens))) == {"b"}
    assert stepper.state_of("a") is State.DRAINING
    assert stepper.scheduler.stats().outputs.stale_outputs == 1


def test_tokens_from_non_sampling_row_are_a_fault() -> None:
    stepper = Stepper(small_engine([], max_num_batched_tokens=4))
    stepper.submit(greedy("a", range(12), 4))
    stepper.plan()
    plan, output = stepper.receive()
    tokens = np.where(output.tokens < 0, 7, output.tokens).astype(np.int32)
    with pytest.raises(MalformedOutput, match="no row of the step samples"):
        commit(stepper, plan, dataclasses.replace(output, tokens=tokens))
