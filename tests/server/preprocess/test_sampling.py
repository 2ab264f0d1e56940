"""Request fields to sampling parameters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fd_core.server.preprocess.sampling import choice_seed, sampling_params, text_cost
from fd_core.server.schemas.requests import ChatRequest, CompletionRequest, Message
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
