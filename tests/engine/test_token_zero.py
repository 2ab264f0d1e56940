"""Token id 0 is a token: as what is generated, as a stop, as the end of a text, as a bias and as a draft."""

from __future__ import annotations

import functools

import pytest

from fd_core.types import FinishReason, RequestSpec, SamplingParams
from tests.engine.stepping import Stepper, greedy, scripted, small_engine

DRAFTS = pytest.mark.parametrize("k", [0, 1, 3, 5])
DEPTHS = pytest.mark.parametrize("depth", [1, 2])
LENGTH = 40
FAVOURED = {0: 50.0}
"""A bias under which every token is 0."""


@functools.cache
def with_zero_inside() -> tuple[tuple[int, ...], int]:
    """Return a prompt whose greedy text of LENGTH tokens has its first 0 at the place returned, not at its ends."""
    for first in range(256):
        prompt = (first, 1, 4, 1, 5)
        text = scripted(greedy("a", prompt, LENGTH))
        if 0 in text[3:-1] and 0 not in text[:3]:
            return prompt, text.index(0)
    raise AssertionError("no text of the script has a 0")


def deliver(spec: RequestSpec, k: int, depth: int) -> tuple[list[int], FinishReason]:
    """Return text and end of a request whose drafts are right while nothing ends or biases it."""
    stepper = Stepper(small_engine([greedy("whole", spec.prompt, LENGTH)], k))
    stepper.submit(spec)
    texts = stepper.run(depth)
    return texts.tokens[spec.request_id], texts.ends[spec.request_id]


@DRAFTS
@DEPTHS
@pytest.mark.law("1.9")
def test_it_is_delivered(k: int, depth: int) -> None:
    prompt, place = with_zero_inside()
    spec = greedy("a", prompt, LENGTH)
    text, end = deliver(spec, k, depth)
    assert (text, text[place], end) == (scripted(spec), 0, FinishReason.LENGTH)


@DRAFTS
@DEPTHS
@pytest.mark.law("1.9")
def test_as_a_stop_token_it_ends_a_text(k: int, depth: int) -> None:
    prompt, place = with_zero_inside()
    whole = scripted(greedy("a", prompt, LENGTH))
    for stops in ((0,), (257, 0), (0, 258)):
        spec = greedy("a", prompt, LENGTH, stop_token_ids=stops)
        assert deliver(spec, k, depth) == (whole[: place + 1], FinishReason.STOP)


@DRAFTS
@DEPTHS
def test_as_the_end_of_text_it_ends_a_text(k: int, depth: int) -> None:
    prompt, place = with_zero_inside()
    whole = scripted(greedy("a", prompt, LENGTH))
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH)
    spec = RequestSpec(request_id="a", prompt=prompt, params=params, eos_token_ids=(0,))
    assert deliver(spec, k, depth) == (whole[: place + 1], FinishReason.STOP)


@pytest.mark.parametrize("field", ["stop_token_ids", "eos_token_ids"])
def test_before_min_tokens_it_ends_nothing_and_does_not_come(field: str) -> None:
    prompt, place = with_zero_inside()
    whole = scripted(greedy("a", prompt, LENGTH))
    params = {"temperature": 0.0, "max_tokens": LENGTH, "min_tokens": place + 3}
    stops = {"stop_token_ids": (0,), "ignore_eos": True} if field == "stop_token_ids" else {}
    spec = RequestSpec(
        request_id="a",
        prompt=prompt,
        params=SamplingParams(**params, **stops),  # type: ignore[arg-type]  # fields by name
        eos_token_ids=(0,) if field == "eos_token_ids" else (),
    )
    text, _ = deliver(spec, 0, 1)
    assert text[:place] == whole[:place]
    assert len(text) >= place + 3
    assert 0 not in text[: place + 3]


@DRAFTS
def test_a_bias_brings_it(k: int) -> None:
    spec = greedy("a", (3, 1, 4), 12, logit_bias=FAVOURED)
    assert deliver(spec, k, 1) == ([0] * 12, FinishReason.LENGTH)


@DRAFTS
def test_a_bias_bans_it_and_changes_nothing_before(k: int) -> None:
    prompt, place = with_zero_inside()
    text, _ = deliver(greedy("a", prompt, LENGTH, logit_bias={0: -100.0}), k, 1)
    assert text[:place] == scripted(greedy("a", prompt, place))
    assert 0 not in text
    assert len(text) == LENGTH


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_count_it(penalty: str) -> None:
    """Under a bias that just brings it every time, a penalty lets other tokens come once it has come."""
    bias = {"logit_bias": {0: 8.5}}
    assert set(deliver(greedy("a", (3, 1, 4), LENGTH, **bias), 0, 1)[0]) == {0}
    text, _ = deliver(greedy("a", (3, 1, 4), LENGTH, **bias, **{penalty: 2.0}), 0, 1)
    assert text[0] == 0
    assert len(set(text)) > 1


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.law("1.9")
def test_as_a_draft_it_is_accepted(k: int) -> None:
    prompt, _ = with_zero_inside()
    spec = greedy("a", prompt, LENGTH)
    stepper = Stepper(small_engine([spec], k))
    stepper.submit(spec)
    assert stepper.run(1).tokens["a"] == scripted(spec)
    drafts = stepper.engine.stats().scheduler.drafts
    assert drafts.accepted == drafts.proposed > LENGTH * k // (k + 1) - k - 1


def test_log_probabilities_tell_it() -> None:
    prompt, place = with_zero_inside()
    stepper = Stepper(small_engine([]))
    stepper.submit(greedy("a", prompt, LENGTH, logprobs=1))
    score = stepper.run(1).scores["a"][place]
    assert score.top_ids == (0,)
    assert score.top == (score.logprob,)
