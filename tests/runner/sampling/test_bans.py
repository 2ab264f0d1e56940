"""Banned tokens: sequences banned by a request, and tokens outside its allow list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.ops.numpy.ops import NumpyOps
from fd_core.runner.sampling.sampler import Bans, Sampler
from fd_core.types import Admission, SamplingParams

VOCABULARY = 40
sequences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=6)


def ends_with(text: list[int], banned: tuple[int, ...]) -> bool:
    return text[-len(banned) :] == list(banned) and len(text) >= len(banned)


@given(sequences, st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.integers(0, 3), max_size=12))
def test_token_completing_a_banned_sequence_is_banned(
    banned: list[tuple[int, ...]], prompt: list[int], text: list[int]
) -> None:
    tokens = np.array([*prompt, *text, 9, 9], np.int32)
    bans = Bans(banned, len(prompt))
    for position in range(len(text) + 1):
        found = set(bans.at(len(prompt) + position, tokens).tolist())
        wanted = {token for token in range(4) for each in banned if ends_with([*text[:position], token], each)}
        assert found == wanted


def chosen(params: SamplingParams, tokens: list[int], favourites: list[int], columns: int = 1) -> list[int]:
    """Return the tokens that a greedy request samples after a one-token prompt and `tokens`, for its last `columns`."""
    sampler = Sampler(NumpyOps(), 2, VOCABULARY)
    sampler.admit(Admission(1, 0, np.array(tokens[:1], np.int32), 1, params, eos_token_ids=(0,), computed=0))
    logits = np.zeros((columns, VOCABULARY), np.float32)
    for rank, token in enumerate(favourites):
        logits[:, token] = 10 - rank
    matrix = np.zeros((2, 20), np.int32)
    matrix[1, : len(tokens)] = tokens
    positions = np.arange(len(tokens) - columns + 1, len(tokens) + 1, dtype=np.int32)
    columns_of = np.arange(columns, dtype=np.int32)
    work = sampler.gather(np.full(columns, 1, np.int32), positions, columns_of, matrix)
    return sampler.sample(logits, work).tokens.tolist()


def test_banned_sequences_include_draft_tokens() -> None:
    params = SamplingParams(temperature=0.0, bad_words_token_ids=((5,), (1, 2, 3)))
    assert chosen(params, [9, 1, 2], [5, 3, 7], columns=3) == [3, 3, 7]


def test_prompt_tokens_do_not_start_a_banned_sequence() -> None:
    params = SamplingParams(temperature=0.0, bad_words_token_ids=((9, 3),))
    assert chosen(params, [9], [3, 7]) == [3]
    assert chosen(params, [9, 9], [3, 7]) == [7]


@pytest.mark.parametrize("allowed", [(4,), (0, 31, 32, 39)])
def test_only_allowed_tokens_are_sampled(allowed: tuple[int, ...]) -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=allowed, logit_bias={5: 100.0})
    assert chosen(params, [9, 5], [5, 6, allowed[-1]], columns=2) == [allowed[-1]] * 2


def test_slot_drops_limits_of_previous_request() -> None:
    sampler = Sampler(NumpyOps(), 1, VOCABULARY)
    for params, token in ((SamplingParams(temperature=0.0, allowed_token_ids=(4,)), 4), (SamplingParams(), 5)):
        greedy = SamplingParams(temperature=0.0, allowed_token_ids=params.allowed_token_ids)
        sampler.admit(Admission(0, 0, np.zeros(1, np.int32), 1, greedy, eos_token_ids=(), computed=0))
        logits = np.zeros((1, VOCABULARY), np.float32)
        logits[0, 5] = 1
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        work = sampler.gather(zero, one, zero, np.zeros((1, 9), np.int32))
        assert sampler.sample(logits, work).tokens.tolist() == [token]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(allowed_token_ids=(1, VOCABULARY)), SamplingParams(bad_words_token_ids=((1, VOCABULARY),))],
)
def test_unknown_token_is_rejected_before_upload(params: SamplingParams) -> None:
    sampler = Sampler(NumpyOps(), 1, VOCABULARY)
    with pytest.raises(ValueError, match=f"has token {VOCABULARY}"):
        sampler.admit(Admission(0, 0, np.zeros(1, np.int32), 1, params, eos_token_ids=(), computed=0))
