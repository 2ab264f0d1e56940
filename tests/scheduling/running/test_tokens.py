"""Token buffers of requests: amortized growth, immutable views, and delivery through slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fd_core.scheduling.running.tokens import DeliveredTokens, TokenBuffer

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=150)


@given(TOKENS, st.integers(0, 400), st.lists(TOKENS, max_size=8))
def test_appended_tokens_are_kept_and_views_never_change(first: list[int], limit: int, more: list[list[int]]) -> None:
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


def test_view_is_a_read_only_slice() -> None:
    buffer = TokenBuffer([1, 2, 3, 4], 10)
    assert buffer.view(1).tolist() == [2, 3, 4]
    assert buffer.view(upto=2).tolist() == [1, 2]
    assert buffer.view(1, 3).tolist() == [2, 3]
    assert buffer.view(4).tolist() == []
    assert buffer.view().dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        buffer.view()[0] = 9


def test_prompt_is_copied() -> None:
    prompt = np.array([1, 2, 3], np.int32)
    buffer = TokenBuffer(prompt, 10)
    prompt[:] = 0
    assert buffer.view().tolist() == [1, 2, 3]


def test_views_share_buffer_and_append_does_not_copy() -> None:
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


def test_buffer_grows_with_output_not_with_max_tokens() -> None:
    """A request may ask for the whole context as max_tokens, and most generate only a few tokens."""
    assert len(TokenBuffer([1] * 10, 32_000)._data) < 200
    assert len(TokenBuffer([1] * 10, 12)._data) == 12
    assert len(TokenBuffer([1] * 10, 5)._data) == 10


SLOTS, STEP_TOKENS = 3, 4
DELIVERIES = st.lists(
    st.lists(st.lists(st.integers(0, 99), max_size=STEP_TOKENS), min_size=SLOTS, max_size=SLOTS), max_size=60
)


@example([[[1, 2, 3, 4]] * SLOTS] * 40, [], [30])
@given(DELIVERIES, st.lists(st.integers(0, 59), max_size=4), st.lists(st.integers(0, 59), max_size=4))
def test_tokens_delivered_to_slots_reach_the_buffers(
    steps: list[list[list[int]]], reads: list[int], moves: list[int]
) -> None:
    """Slot 0 changes its request now and then; slot 1 is read now and then."""
    delivered = DeliveredTokens(SLOTS)
    buffers = [TokenBuffer([slot], 1000) for slot in range(SLOTS)]
    expected = [[slot] for slot in range(SLOTS)]
    left: list[tuple[TokenBuffer, list[int]]] = []
    for slot, buffer in enumerate(buffers):
        buffer.attach(delivered, slot)
    for number, step in enumerate(steps):
        rows = np.flatnonzero([bool(tokens) for tokens in step])
        block = np.full((SLOTS, STEP_TOKENS), -1, np.int32)
        for slot, tokens in enumerate(step):
            block[slot, : len(tokens)] = tokens
            expected[slot] += tokens
        for slot in delivered.full_rows(rows, STEP_TOKENS):
            buffers[slot].take_delivered()
        delivered.append(rows, block[rows], np.array([len(step[slot]) for slot in rows], np.int32))
        assert [buffer.count for buffer in buffers] == [len(tokens) for tokens in expected]
        if number in reads:
            assert buffers[1].view().tolist() == expected[1]
        if number in moves:
            buffers[0].detach()
            left.append((buffers[0], expected[0]))
            buffers[0], expected[0] = TokenBuffer([7], 1000), [7]
            buffers[0].attach(delivered, 0)
    assert [buffer.view().tolist() for buffer in buffers] == expected
    assert all(buffer.view().tolist() == tokens for buffer, tokens in left)


def test_append_follows_delivered_tokens() -> None:
    delivered, buffer = DeliveredTokens(1), TokenBuffer([1], 10)
    buffer.attach(delivered, 0)
    delivered.append(np.array([0]), np.array([[2]], np.int32), np.array([1], np.int32))
    buffer.append([3])
    assert buffer.view().tolist() == [1, 2, 3]
