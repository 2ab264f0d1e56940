"""Request fields to sampling parameters."""

from __future__ import annotations

from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.config.generation import GenerationDefaults
from fd_core.server.preprocess.sampling import sampling_params, text_cost
from fd_core.server.schemas.requests import ChatRequest, CompletionRequest, Message
from fd_core.types import SamplingParams, choice_seed
from tests.server.fakes import engine_info

seeds = st.integers(-(2**63), 2**64 - 1)
TEXT = CompletionRequest(prompt="a")
CHAT = ChatRequest(messages=[Message(role="user", content="a")])


@given(seeds)
def test_first_choice_has_the_seed_and_others_differ(seed: int) -> None:
    derived = [choice_seed(seed, index) for index in range(128)]
    assert derived[0] == seed % 2**64
    assert len(set(derived)) == 128
    assert all(0 <= each < 2**64 for each in derived)


def test_seeds_are_pinned() -> None:
    """A client that stored a seed gets the same choices from every version."""
    assert [choice_seed(1, index) for index in range(3)] == [1, 10451216379200822465, 13757245211066428519]


def test_without_a_seed_each_request_gets_its_own() -> None:
    info = engine_info()
    drawn = {sampling_params(TEXT, info, [16], None)[0].seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= each < 2**63 for each in drawn)


@given(st.integers(1, 500))
def test_prompt_and_output_never_exceed_the_context(length: int) -> None:
    for request, default in ((TEXT, 16), (CHAT, 10**9)):
        cost = text_cost(request, [length], most_texts=1, context=501, limit=None)
        assert cost.outputs == [min(default, 501 - length)]


def test_tiny_temperature_is_greedy_and_top_k_minus_one_is_off() -> None:
    request = CompletionRequest(prompt="a", temperature=1e-300, top_k=-1)
    params = sampling_params(request, engine_info(), [16], None)[0]
    assert params.temperature == 0.0 and params.greedy
    assert params.top_k == 0


def test_each_prompt_gets_its_remaining_context() -> None:
    info = engine_info(max_model_len=20)
    cost = text_cost(TEXT, [1, 10], most_texts=2, context=20, limit=None)
    assert cost.outputs == [16, 10]
    params = sampling_params(TEXT, info, cost.outputs, 3)
    assert [each.max_tokens for each in params] == [16, 10]
    assert params[0].seed == params[1].seed
    assert params[0].logprobs == 3


def test_requests_override_the_defaults_of_the_model() -> None:
    info = engine_info(generation=GenerationDefaults(temperature=0.2, top_k=20, top_p=0.9, repetition_penalty=1.1))
    plain = sampling_params(CHAT, info, [16], None)[0]
    assert (plain.temperature, plain.top_k, plain.top_p, plain.repetition_penalty) == (0.2, 20, 0.9, 1.1)
    request = CompletionRequest(prompt="a", temperature=0, top_k=-1, top_p=1.0)
    asked = sampling_params(request, info, [16], None)[0]
    assert (asked.temperature, asked.top_k, asked.top_p, asked.repetition_penalty) == (0.0, 0, 1.0, 1.1)


def test_defaults_and_requests_have_the_same_ranges() -> None:
    names = set(GenerationDefaults.__struct_fields__) & set(SamplingParams.__struct_fields__) - {"top_k"}
    assert len(names) == 4
    defaults, params = (
        get_type_hints(GenerationDefaults, include_extras=True),
        get_type_hints(SamplingParams, include_extras=True),
    )
    assert {name: defaults[name] for name in names} == {name: params[name] | None for name in names}


@pytest.mark.parametrize(("room", "expected"), [(100, 40), (30, 30)])
def test_default_length_applies_to_conversations_and_fits(room: int, expected: int) -> None:
    for request, outputs in ((CHAT, expected), (TEXT, 16)):
        cost = text_cost(request, [1], most_texts=1, context=room + 1, limit=None, default_tokens=40)
        assert cost.outputs == [outputs]
