"""Token id 0 is an ordinary token: as output, stop token, end of text, biased token and draft."""

from __future__ import annotations

import functools

import pytest

from fd_core.types import FinishReason, RequestSpec, SamplingParams
from tests.engine.stepping import Stepper, greedy, scripted, small_engine

DRAFTS = pytest.mark.parametrize("k", [0, 1, 3, 5])
DEPTHS = pytest.mark.parametrize("depth", [1, 2])
LENGTH = 40
FAVOURED = {0: 50.0}
"""A bias that makes every token 0."""


@functools.cache
def with_zero_inside() -> tuple[tuple[int, ...], int]:
    """Return a prompt whose greedy text of LENGTH tokens has its first 0 at the returned index, neither first nor
    last.
    """
    for first in range(256):
        prompt = (first, 1, 4, 1, 5)
        text = scripted(greedy("a", prompt, LENGTH))
        if 0 in text[3:-1] and 0 not in text[:3]:
            return prompt, text.index(0)
    raise AssertionError("no text of the script has a 0")


def deliver(spec: RequestSpec, k: int, depth: int) -> tuple[list[int], FinishReason]:
    """Return text and finish of a request with all drafts correct until a stop or a bias intervenes."""
    stepper = Stepper(small_engine([greedy("whole", spec.prompt, LENGTH)], k))
    stepper.submit(spec)
    texts = stepper.run(depth)
    return texts.tokens[spec.request_id], texts.ends[spec.request_id]


@DRAFTS
@DEPTHS
@pytest.mark.law("1.9")
def test_token_zero_is_delivered(k: int, depth: int) -> None:
    prompt, position = with_zero_inside()
    spec = greedy("a", prompt, LENGTH)
    text, end = deliver(spec, k, depth)
    assert (text, text[position], end) == (scripted(spec), 0, FinishReason.LENGTH)


@DRAFTS
@DEPTHS
@pytest.mark.law("1.9")
def test_token_zero_as_stop_token_ends_text(k: int, depth: int) -> None:
    prompt, position = with_zero_inside()
    whole = scripted(greedy("a", prompt, LENGTH))
    for stops in ((0,), (257, 0), (0, 258)):
        spec = greedy("a", prompt, LENGTH, stop_token_ids=stops)
        assert deliver(spec, k, depth) == (whole[: position + 1], FinishReason.STOP)


@DRAFTS
@DEPTHS
def test_token_zero_as_eos_ends_text(k: int, depth: int) -> None:
    prompt, position = with_zero_inside()
    whole = scripted(greedy("a", prompt, LENGTH))
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH)
    spec = RequestSpec(request_id="a", prompt=prompt, params=params, eos_token_ids=(0,))
    assert deliver(spec, k, depth) == (whole[: position + 1], FinishReason.STOP)


@pytest.mark.parametrize("field", ["stop_token_ids", "eos_token_ids"])
def test_token_zero_is_banned_before_min_tokens(field: str) -> None:
    prompt, position = with_zero_inside()
    whole = scripted(greedy("a", prompt, LENGTH))
    params = {"temperature": 0.0, "max_tokens": LENGTH, "min_tokens": position + 3}
    stops = {"stop_token_ids": (0,), "ignore_eos": True} if field == "stop_token_ids" else {}
    spec = RequestSpec(
        request_id="a",
        prompt=prompt,
        params=SamplingParams(**params, **stops),  # type: ignore[arg-type]  # fields by name
        eos_token_ids=(0,) if field == "eos_token_ids" else (),
    )
    text, _ = deliver(spec, 0, 1)
    assert text[:position] == whole[:position]
    assert len(text) >= position + 3
    assert 0 not in text[: position + 3]


@DRAFTS
def test_bias_forces_token_zero(k: int) -> None:
    spec = greedy("a", (3, 1, 4), 12, logit_bias=FAVOURED)
    assert deliver(spec, k, 1) == ([0] * 12, FinishReason.LENGTH)


@DRAFTS
def test_bias_bans_token_zero_and_keeps_earlier_tokens(k: int) -> None:
    prompt, position = with_zero_inside()
    text, _ = deliver(greedy("a", prompt, LENGTH, logit_bias={0: -100.0}), k, 1)
    assert text[:position] == scripted(greedy("a", prompt, position))
    assert 0 not in text
    assert len(text) == LENGTH


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_count_token_zero(penalty: str) -> None:
    """The bias is just strong enough to force token 0, so a penalty lets other tokens follow its first occurrence."""
    bias = {"logit_bias": {0: 8.5}}
    assert set(deliver(greedy("a", (3, 1, 4), LENGTH, **bias), 0, 1)[0]) == {0}
    text, _ = deliver(greedy("a", (3, 1, 4), LENGTH, **bias, **{penalty: 2.0}), 0, 1)
    assert text[0] == 0
    assert len(set(text)) > 1


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.law("1.9")
def test_token_zero_is_accepted_as_draft(k: int) -> None:
    prompt, _ = with_zero_inside()
    spec = greedy("a", prompt, LENGTH)
    stepper = Stepper(small_engine([spec], k))
    stepper.submit(spec)
    assert stepper.run(1).tokens["a"] == scripted(spec)
    drafts = stepper.engine.stats().scheduler.drafts
    assert drafts.accepted == drafts.proposed > LENGTH * k // (k + 1) - k - 1


def test_logprobs_report_token_zero() -> None:
    prompt, position = with_zero_inside()
    stepper = Stepper(small_engine([]))
    stepper.submit(greedy("a", prompt, LENGTH, logprobs=1))
    score = stepper.run(1).scores["a"][position]
    assert score.top_ids == (0,)
    assert score.top == (score.logprob,)
