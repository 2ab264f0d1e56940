"""Texts end exactly where the request specifies, with or without drafts, and usage counts what was delivered."""

from __future__ import annotations

import pytest

from fd_core.types import FinishReason, RequestSpec, SamplingParams
from tests.engine.helpers import golden
from tests.engine.stepping import Stepper, greedy, scripted, small_engine

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
DRAFTS = pytest.mark.parametrize("k", [0, 1, 3, 5])


def delivered(spec: RequestSpec, k: int, depth: int = 1) -> tuple[list[int], FinishReason]:
    stepper = Stepper(small_engine([greedy("whole", spec.prompt, 56)], k))
    stepper.submit(spec)
    texts = stepper.run(depth)
    return texts.tokens[spec.request_id], texts.ends[spec.request_id]


@DRAFTS
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 20])
def test_text_has_max_tokens_tokens(max_tokens: int, k: int) -> None:
    spec = greedy("a", PROMPT, max_tokens)
    assert delivered(spec, k) == (scripted(spec), FinishReason.LENGTH)


@DRAFTS
@pytest.mark.parametrize("depth", [1, 3])
def test_text_ends_at_context_length(k: int, depth: int) -> None:
    whole = scripted(greedy("a", PROMPT, 56))
    assert delivered(greedy("a", PROMPT, 1000), k, depth) == (whole, FinishReason.LENGTH)


@DRAFTS
@pytest.mark.parametrize("depth", [1, 2])
def test_stop_token_ends_text_at_any_draft_position(k: int, depth: int) -> None:
    text = scripted(greedy("a", PROMPT, 56))
    for position, token in enumerate(text[:12]):
        if token not in text[:position]:
            spec = greedy("a", PROMPT, 56, stop_token_ids=(token,))
            assert delivered(spec, k, depth) == (text[: position + 1], FinishReason.STOP)


@DRAFTS
def test_penalties_count_preceding_draft_tokens(k: int) -> None:
    """The penalty is so strong that no token repeats: each draft must count before the next one is chosen."""
    params = SamplingParams(
        max_tokens=40,
        temperature=0.0,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        logit_bias=dict.fromkeys(range(12), 4.0),
        ignore_eos=True,
    )
    spec = RequestSpec(request_id="a", prompt=PROMPT, params=params)
    stepper = Stepper(small_engine([spec], k))
    stepper.submit(spec)
    assert stepper.run(1).tokens == golden([spec])
    if k:
        assert stepper.engine.stats().scheduler.drafts.accepted > 0


@pytest.mark.parametrize("salts", [("one", "two"), ("tenant-1", "tenant-2"), ("a", "ab"), ("ab", "a"), ("", "a")])
def test_cache_salts_separate_prefixes(salts: tuple[str, str]) -> None:
    stepper = Stepper(small_engine([], num_kv_blocks=64))
    for name, salt in zip("abc", (*salts, salts[0]), strict=True):
        stepper.submit(greedy(name, PROMPT, 2, cache_salt=salt))
        stepper.run(1)
        assert stepper.engine.stats().scheduler.counters.prefix_hits == (4 if name == "c" else 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_of_one_token_request_stays_cached(depth: int) -> None:
    stepper = Stepper(small_engine([]))
    for name in "ab":
        stepper.submit(greedy(name, range(10), 1))
        stepper.run(depth)
    assert stepper.engine.stats().scheduler.counters.prefix_hits == 8
