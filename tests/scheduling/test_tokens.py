"""The token buffer of a request: it grows in place, and what was seen of it never changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.scheduling.requests import TokenBuffer

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=150)


@given(TOKENS, st.integers(0, 400), st.lists(TOKENS, max_size=8))
def test_it_holds_what_was_appended_and_views_never_change(first: list[int], limit: int, more: list[list[int]]) -> None:
    buffer = TokenBuffer(first, max(limit, len(first)))
    expected = list(first)
    seen = []
    for tokens in more:
        seen.append((buffer.view(), list(expected)))
        buffer.append(tokens)
        expected += tokens
    assert buffer.count == len(expected)
    assert buffer.view().tolist() == expected
    assert all(view.tolist() == before for view, before in seen)


def test_a_view_is_a_part_and_read_only() -> None:
    buffer = TokenBuffer([1, 2, 3, 4], 10)
    assert buffer.view(1).tolist() == [2, 3, 4]
    assert buffer.view(upto=2).tolist() == [1, 2]
    assert buffer.view(1, 3).tolist() == [2, 3]
    assert buffer.view(4).tolist() == []
    assert buffer.view().dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        buffer.view()[0] = 9


def test_the_prompt_is_a_copy() -> None:
    prompt = np.array([1, 2, 3], np.int32)
    buffer = TokenBuffer(prompt, 10)
    prompt[:] = 0
    assert buffer.view().tolist() == [1, 2, 3]


def test_views_share_the_buffer_and_a_token_costs_no_copy_of_the_others() -> None:
    buffer = TokenBuffer(range(100_000), 200_000)
    before = buffer.view()
    copies = 0
    for token in range(50_000):
        data = buffer._data
        buffer.append((token,))
        copies += buffer._data is not data
    assert copies <= 2
    assert np.shares_memory(buffer.view(), buffer.view(5, 10))
    assert before.tolist() == list(range(100_000))


def test_a_short_answer_takes_no_room_for_a_long_one() -> None:
    """A request may ask for as many tokens as the context has, and most come to a few."""
    assert len(TokenBuffer([1] * 10, 32_000)._data) < 200
    assert len(TokenBuffer([1] * 10, 12)._data) == 12
    assert len(TokenBuffer([1] * 10, 5)._data) == 10
