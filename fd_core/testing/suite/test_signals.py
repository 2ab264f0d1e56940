"""Signalling: preempted slots, protocol 1. Mandatory for every backend.

The first part drives the runner step by step; in the second the scheduler preempts with outputs in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from fd_core.engine.core import Engine
from fd_core.engine.device import make_device
from fd_core.runner.runner import LaunchedStep
from fd_core.scheduling.requests import State
from fd_core.signals import Outcome
from fd_core.testing.kit.judging import Golden
from fd_core.testing.kit.requirements import thorough_but
from fd_core.testing.kit.target import Target
from fd_core.testing.models.stepper import ManualDriver, Stepper
from fd_core.testing.models.texts import greedy, run
from fd_core.types import FinishReason, RequestSpec, StepOutput, StepPlan

KS = [0, 1, 3, 5]
PROMPTS: list[list[int]] = np.random.default_rng(1).integers(0, 90, (8, 16)).tolist()


def long_ones(count: int, max_tokens: int = 44) -> list[RequestSpec]:
    """Return requests, each of which nearly fills the pool of a small engine."""
    return [greedy(f"r{index}", PROMPTS[index][:8], max_tokens) for index in range(count)]


@contextmanager
def manual_driver(target: Target, golden: Golden, k: int = 0, slots: Sequence[int] = ()) -> Iterator[ManualDriver]:
    """Return a runner with requests in some slots, each with an uncomputed prompt of eight tokens."""
    with target.engine(k, golden.whole(long_ones(4)), max_num_batched_tokens=40) as engine:
        hand = ManualDriver(engine)
        for slot in slots:
            hand.admit(slot, PROMPTS[slot][:8])
        yield hand
        hand.close()


@pytest.mark.parametrize("k", thorough_but(KS, 0, 3))
@pytest.mark.law("1.2")
def test_a_revocation_is_answered_in_its_own_step(target: Target, golden: Golden, k: int) -> None:
    with manual_driver(target, golden, k, slots=[0, 2, 3]) as hand:
        _, first = hand.step((0, 8), (2, 8), (3, 8))
        assert (first.kinds == Outcome.RELEASED).sum() == 0
        _, second = hand.step((0, 1), (3, 1), back=[2])
        assert np.flatnonzero(second.kinds == Outcome.RELEASED).tolist() == [2]
        _, third = hand.step((0, 1), (3, 1))
        assert (third.kinds == Outcome.RELEASED).sum() == 0


@pytest.mark.parametrize("k", thorough_but(KS, 0, 3))
@pytest.mark.law("1.3")
def test_rows_next_to_a_revocation_keep_their_tokens(target: Target, golden: Golden, k: int) -> None:
    with manual_driver(target, golden, k, slots=range(4)) as hand:
        hand.step(*((slot, 8) for slot in range(4)))
        drafts = int(k > 0)
        _, outcomes = hand.step((3, 1, True, drafts), (0, 1, True, drafts), (2, 1, True, drafts), back=[1])
        assert outcomes.kinds[[0, 2, 3]].tolist() == [Outcome.TOKENS] * 3
        for slot in (0, 2, 3):
            spec = long_ones(4)[slot]
            delivered = hand.runner.batch.tokens[slot, 8 : 8 + 1 + outcomes.counts[slot]].tolist()
            assert delivered[1:] == outcomes.tokens[slot, : outcomes.counts[slot]].tolist()
            golden.check_prefix(spec, delivered)


@pytest.mark.law("1.2")
def test_a_row_that_is_left_out_of_a_step_is_not_released(target: Target, golden: Golden) -> None:
    """An absent row is never a release."""
    with manual_driver(target, golden, slots=range(2)) as hand:
        hand.step((0, 8), (1, 8))
        _, without = hand.step((0, 1))
        assert without.kinds.tolist() == [Outcome.TOKENS, *[Outcome.EMPTY] * 3]
        _, again = hand.step((0, 1), (1, 1))
        assert again.kinds[:2].tolist() == [Outcome.TOKENS] * 2


@pytest.mark.parametrize("k", thorough_but(KS, 0, 3))
@pytest.mark.law("1.2")
def test_idle_slot_is_empty(target: Target, golden: Golden, k: int) -> None:
    with manual_driver(target, golden, k, slots=[1, 2]) as hand:
        _, first = hand.step((1, 8), (2, 8))
        assert first.kinds.tolist() == [Outcome.EMPTY, Outcome.TOKENS, Outcome.TOKENS, Outcome.EMPTY]
        hand.step((2, 1), back=[1])
        _, third = hand.step((2, 1))
        assert third.kinds.tolist() == [Outcome.EMPTY, Outcome.EMPTY, Outcome.TOKENS, Outcome.EMPTY]


def test_unfinished_chunk_delivers_nothing(target: Target, golden: Golden) -> None:
    with manual_driver(target, golden, slots=range(2)) as hand:
        _, first = hand.step((0, 5, False), (1, 8))
        assert first.kinds[:2].tolist() == [Outcome.EMPTY, Outcome.TOKENS]
        _, second = hand.step((0, 3, True))
        assert second.kinds[:2].tolist() == [Outcome.TOKENS, Outcome.EMPTY]
        golden.check_prefix(long_ones(1)[0], second.tokens[0, :1].tolist())


@pytest.mark.parametrize("k", thorough_but(KS, 0, 3))
@pytest.mark.law("1.3")
def test_a_batch_that_is_revoked_as_a_whole_is_answered(target: Target, golden: Golden, k: int) -> None:
    with manual_driver(target, golden, k, slots=range(3)) as hand:
        hand.step((0, 8), (1, 8), (2, 8))
        output, outcomes = hand.step(back=[0, 1, 2])
        assert output.step == 1
        assert outcomes.kinds.tolist() == [*[Outcome.RELEASED] * 3, Outcome.EMPTY]


@pytest.mark.law("1.1")
def test_a_slot_that_is_used_again_starts_anew(target: Target, golden: Golden) -> None:
    """No token or other state of the previous request remains in the slot."""
    with manual_driver(target, golden) as hand:
        hand.admit(0, PROMPTS[3][:12])
        hand.step((0, 12))
        hand.step((0, 1))
        hand.step(back=[0])
        hand.admit(0, PROMPTS[1][:8])
        _, chunk = hand.step((0, 5, False))
        assert chunk.kinds[0] == Outcome.EMPTY
        text = []
        for count in (3, 1, 1):
            _, outcomes = hand.step((0, count))
            text += outcomes.tokens[0, : outcomes.counts[0]].tolist()
        golden.check_prefix(long_ones(2)[1], text)


@pytest.mark.parametrize("k", thorough_but(KS[1:], 3))
def test_rejected_drafts_are_empty_and_accepted_ones_are_not(target: Target, golden: Golden, k: int) -> None:
    specs = long_ones(1)
    for wrong in (0.0, 1.0):
        with target.engine(k, golden.whole(specs), wrong) as engine:
            hand = ManualDriver(engine)
            hand.admit(0, PROMPTS[0][:8])
            _, first = hand.step((0, 8))
            _, second = hand.step((0, 1, True, k))
            hand.close()
        text = [*first.tokens[0, :1].tolist(), *second.tokens[0, : second.counts[0]].tolist()]
        golden.check_prefix(specs[0], text)
        assert second.counts[0] == (1 if wrong else 1 + k)


@pytest.mark.parametrize("k", thorough_but(KS, 0, 3))
@pytest.mark.law("1.9")
def test_token_id_zero_is_a_token(target: Target, k: int) -> None:
    """Token 0 is delivered, accepted as a draft, and works as a stop token and as end of text."""
    prompt, favoured = PROMPTS[0][:8], {"logit_bias": {0: 100.0}}
    specs = [
        greedy("text", prompt, 12, **favoured),
        greedy("stop", prompt, 12, **favoured, stop_token_ids=(0,)),
        msgspec.structs.replace(greedy("end", prompt, 12, **favoured, ignore_eos=False), eos_token_ids=(0,)),
    ]
    with target.engine(k, [[*prompt, *[0] * 12]]) as engine:
        texts = run(engine, specs)
    assert texts.tokens == {"text": [0] * 12, "stop": [0], "end": [0]}
    ends = {"text": FinishReason.LENGTH, "stop": FinishReason.STOP, "end": FinishReason.STOP}
    assert texts.ends == ends


@contextmanager
def sending(engine: Engine, specs: Sequence[RequestSpec], transport: str) -> Iterator[Stepper]:
    """Return a stepper with requests, whose plans and outputs are serialized."""
    device = make_device(engine.probe().runner, 2, transport)
    stepper = Stepper(engine, eager=True, device=device)
    stepper.submit(*specs)
    yield stepper
    device.close()


@contextmanager
def pressed(
    target: Target, golden: Golden, specs: Sequence[RequestSpec], k: int = 0, transport: str = "memory", **changes: Any
) -> Iterator[Stepper]:
    """Return a stepper that admits all requests at once into a pool for one of them."""
    loaded = target.engine(k, golden.whole(specs) if k else (), 0.3, **changes)
    with loaded as engine, sending(engine, specs, transport) as stepper:
        yield stepper


@pytest.mark.parametrize("transport", ["memory", "zmq"])
@pytest.mark.parametrize("depth", thorough_but([1, 2, 3], 2))
@pytest.mark.parametrize("k", thorough_but(KS, 0, 3))
@pytest.mark.law("1.1")
def test_preempted_again_and_again_nothing_is_lost(
    target: Target, golden: Golden, k: int, depth: int, transport: str
) -> None:
    specs = long_ones(3, 34)
    victims: Counter[str] = Counter()
    with pressed(target, golden, specs, k=k, transport=transport, num_kv_blocks=16) as stepper:
        stepper.run(
            depth, watch=lambda plan: victims.update(stepper.request_in(back.slot) for back in plan.revocations)
        )
        assert sum(victims.values()) >= 2, "no request was preempted"
        golden.check(specs, stepper.texts.tokens)


@pytest.mark.parametrize("transport", ["memory", "zmq"])
def test_a_batch_that_is_preempted_as_a_whole_goes_on(target: Target, golden: Golden, transport: str) -> None:
    specs = long_ones(2)
    alone: list[StepPlan] = []
    with pressed(target, golden, specs, k=0, transport=transport) as stepper:
        stepper.run(2, watch=lambda plan: alone.append(plan) if plan.revocations and not len(plan.slots) else None)
        assert alone, "no step consisted of revocations alone"
        golden.check(specs, stepper.texts.tokens)


@pytest.mark.parametrize("depth", thorough_but([2, 3], 2))
@pytest.mark.law("1.1")
def test_tokens_in_flight_at_a_preemption_are_delivered(target: Target, golden: Golden, depth: int) -> None:
    specs = long_ones(3)
    with pressed(target, golden, specs) as stepper:
        assert stepper.plan_until(depth, State.DRAINING, "r2")
        before = len(stepper.texts.tokens["r2"])
        slot = next(plan.revocations[0].slot for plan, _ in stepper.in_flight if plan.revocations)
        promised = sum(int(plan.samples[plan.slots == slot].sum()) for plan, _ in stepper.in_flight)
        while stepper.in_flight:
            stepper.answer()
        assert len(stepper.texts.tokens["r2"]) == before + promised
        assert stepper.state_of("r2") is State.WAITING
        golden.check_prefix(specs[2], stepper.texts.tokens["r2"])


@pytest.mark.law("1.6")
def test_a_text_that_ends_while_it_drains_is_not_requeued(target: Target, golden: Golden) -> None:
    specs = long_ones(3)
    with pressed(target, golden, specs) as probe:
        assert probe.plan_until(2, State.DRAINING, "r2")
        known = len(probe.texts.tokens["r2"])
        probe.run(2)
        text = probe.texts.tokens["r2"]
    stop = next(token for token in text[known:] if token not in text[:known])
    last = greedy("r2", specs[2].prompt, 44, stop_token_ids=(stop,))
    with pressed(target, golden, [*specs[:2], last]) as stepper:
        stepper.run(2)
        assert stepper.texts.ends["r2"] is FinishReason.STOP
        assert stepper.texts.tokens["r2"] == text[: text.index(stop) + 1]
        assert stepper.engine.stats().scheduler.outputs.finished[FinishReason.STOP] == 1


@pytest.mark.parametrize("state", ["waiting", "between chunks", "running", "draining", "preempted"])
@pytest.mark.law("1.7")
def test_an_abort_ends_a_request_in_every_state(target: Target, golden: Golden, state: str) -> None:
    specs = long_ones(3)
    changes: dict[str, Any] = {"max_num_batched_tokens": 12} if state == "between chunks" else {}
    with pressed(target, golden, specs, **changes) as stepper:
        if state in ("draining", "preempted"):
            assert stepper.plan_until(2, State.DRAINING, "r2")
        elif state != "waiting":
            stepper.plan()
        if state == "preempted":
            while stepper.in_flight:
                stepper.answer()
        name = "r1" if state == "between chunks" else "r2"
        for _ in range(2):
            stepper.abort(name)
        if state in ("waiting", "preempted"):
            assert stepper.texts.ends == {name: FinishReason.ABORT}
        stepper.run(2)
        assert stepper.texts.ends.pop(name) is FinishReason.ABORT
        assert set(stepper.texts.ends.values()) == {FinishReason.LENGTH}
        for spec in specs:
            golden.check_prefix(spec, stepper.texts.tokens.get(spec.request_id, []))
        others = [spec for spec in specs if spec.request_id != name]
        golden.check(others, stepper.texts.tokens)


@pytest.mark.parametrize("transport", ["memory", "zmq"])
@pytest.mark.law("1.3")
def test_an_error_in_a_row_swallows_no_other_row(target: Target, golden: Golden, transport: str) -> None:
    specs = long_ones(3, 20)
    with target.engine(num_kv_blocks=64, output_transport=transport) as engine:
        finish, steps = engine.probe().runner.finish, 0

        def failing(launched: LaunchedStep) -> StepOutput:
            nonlocal steps
            steps += 1
            output = finish(launched)
            return replace(output, errors=((1, "the row failed"),)) if steps == 4 else output

        engine.probe().runner.finish = failing  # type: ignore[method-assign]  # patched
        with sending(engine, specs, transport) as stepper:
            stepper.run(1)
    failed = [name for name, end in stepper.texts.ends.items() if end is FinishReason.ERROR]
    assert len(failed) == 1
    golden.check([spec for spec in specs if spec.request_id not in failed], stepper.texts.tokens)


@pytest.mark.parametrize("transport", ["memory", "zmq"])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_whose_logits_are_not_finite_fails_alone(
    target: Target, golden: Golden, transport: str, k: int, temperature: float
) -> None:
    """Overflow logits by a tiny penalty, in the prompt of one request and at the first token of another."""
    healthy = long_ones(2, 20)
    others = tuple(token for token in range(90) if token not in PROMPTS[3][:8])
    how: dict[str, Any] = {"temperature": temperature, "allowed_token_ids": others}
    strange = [
        greedy("prompt", PROMPTS[2][:8], 20, temperature=temperature, logprobs=2, repetition_penalty=1e-60),
        greedy("first", PROMPTS[3][:8], 20, repetition_penalty=1e-60, **how),
    ]
    # A drafter with the text without the penalty is correct until the request fails.
    known = golden.whole([*healthy, greedy("first", PROMPTS[3][:8], 20, **how)])
    with target.engine(k, known, num_kv_blocks=64, output_transport=transport, pipeline_depth=2) as engine:
        texts = run(engine, [strange[0], healthy[0], strange[1], healthy[1]])
    ends = {"prompt": FinishReason.ERROR, "first": FinishReason.ERROR, "r0": FinishReason.LENGTH}
    assert texts.ends == {**ends, "r1": FinishReason.LENGTH}
    assert texts.tokens["prompt"] == []
    assert len(texts.tokens["first"]) == 1
    golden.check(healthy, texts.tokens)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.law("1.9")
def test_no_negative_id_reaches_log_probabilities(target: Target, golden: Golden, k: int) -> None:
    specs = [greedy(spec.request_id, spec.prompt, 34, logprobs=3) for spec in long_ones(3)]
    with pressed(target, golden, specs, k=k) as stepper:
        texts = stepper.run(2)
        for spec in specs:
            scores = texts.scores[spec.request_id]
            assert len(scores) == len(texts.tokens[spec.request_id]) == 34
            for token, score in zip(texts.tokens[spec.request_id], scores, strict=True):
                assert token == score.top_ids[0]
                assert score.logprob == score.top[0] <= 0.0
