"""Signalling: preempted slots, protocol 1. Mandatory for every backend.

First the runner computes plans without a scheduler; then the scheduler preempts with outputs in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from fd_core.scheduling.requests import State
from fd_core.testing.kit.judging import Golden
from fd_core.testing.kit.target import Target
from fd_core.testing.models.stepper import Stepper
from fd_core.testing.models.texts import greedy, run
from fd_core.testing.suite.scale.test_plans import requests, run_random_plans
from fd_core.types import FinishReason, RequestSpec

KS = [0, 3]
PROMPTS: list[list[int]] = np.random.default_rng(1).integers(0, 90, (8, 16)).tolist()


def long_ones(count: int, max_tokens: int = 44) -> list[RequestSpec]:
    """Return requests, each of which nearly fills the pool of a small engine."""
    return [greedy(f"r{index}", PROMPTS[index][:8], max_tokens) for index in range(count)]


@pytest.mark.parametrize("k", KS)
@pytest.mark.law("1.1", "1.2", "1.3")
def test_each_slot_of_random_plans_is_answered(target: Target, k: int) -> None:
    """Compute chunks, decodes, revocations and steps without rows in few slots: each has its tokens, -9 or nothing."""
    specs = requests(target.exact, count=12, lengths=(1, 2, 3, 7, 8, 9, 20, 40))
    room = {"max_num_seqs": 5, "max_model_len": 80, "max_num_batched_tokens": 23}
    plans = run_random_plans(target, 2, k, specs, tokens=300, plans=200, **room)
    for what in ("revocations", "revocations alone", "ended", "trickle", "nothing"):
        assert plans.seen[what], f"no plan had {what}"


@pytest.mark.parametrize("k", KS)
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
def pressed(target: Target, golden: Golden, specs: Sequence[RequestSpec], k: int = 0) -> Iterator[Stepper]:
    """Return a stepper that admits all requests at once into a pool for one of them."""
    with target.engine(k, golden.whole(specs) if k else (), 0.3) as engine:
        stepper = Stepper(engine, eager=True)
        stepper.submit(*specs)
        yield stepper


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


@pytest.mark.parametrize("k", KS)
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
