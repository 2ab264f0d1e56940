"""Token matrix: legal rows become typed outcomes, illegal ones are rejected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID, MalformedOutput, Outcome, read

WIDTH = 4


@st.composite
def legal_rows(draw: st.DrawFn) -> tuple[list[int], Outcome]:
    kind = draw(st.sampled_from([Outcome.EMPTY, Outcome.TOKENS, Outcome.RELEASED]))
    if kind is Outcome.TOKENS:
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=WIDTH))
    else:
        tokens = [PREEMPTED_TOKEN_ID] if kind is Outcome.RELEASED else []
    return tokens + [EMPTY_TOKEN_ID] * (WIDTH - len(tokens)), kind


@given(st.lists(legal_rows(), min_size=1, max_size=8))
def test_legal_rows_round_trip(rows: list[tuple[list[int], Outcome]]) -> None:
    outcomes = read(np.array([row for row, _ in rows], np.int32))
    assert outcomes.kinds.tolist() == [kind for _, kind in rows]
    assert outcomes.counts.tolist() == [sum(token >= 0 for token in row) for row, _ in rows]


def test_token_zero_is_a_token() -> None:
    outcomes = read(np.array([[0]], np.int32))
    assert (outcomes.kinds[0], outcomes.counts[0]) == (Outcome.TOKENS, 1)


@pytest.mark.parametrize(
    "row",
    [
        [5, EMPTY_TOKEN_ID, 7, EMPTY_TOKEN_ID],
        [PREEMPTED_TOKEN_ID, 5, EMPTY_TOKEN_ID, EMPTY_TOKEN_ID],
        [5, PREEMPTED_TOKEN_ID, EMPTY_TOKEN_ID, EMPTY_TOKEN_ID],
        [EMPTY_TOKEN_ID, 5, EMPTY_TOKEN_ID, EMPTY_TOKEN_ID],
        [-2, EMPTY_TOKEN_ID, EMPTY_TOKEN_ID, EMPTY_TOKEN_ID],
    ],
)
@pytest.mark.law("1.3")
def test_illegal_row_is_rejected(row: list[int]) -> None:
    with pytest.raises(MalformedOutput, match="slot 1"):
        read(np.array([[EMPTY_TOKEN_ID] * WIDTH, row], np.int32))


@pytest.mark.law("1.3")
def test_error_does_not_hide_the_release_of_its_slot() -> None:
    outcomes = read(np.array([[PREEMPTED_TOKEN_ID], [4]], np.int32), errors=((0, "broken"), (1, "broken")))
    assert outcomes.kinds.tolist() == [Outcome.RELEASED, Outcome.ERROR]
    assert outcomes.counts.tolist() == [0, 0]


def test_error_in_one_row_leaves_the_others() -> None:
    outcomes = read(np.array([[3], [4]], np.int32), errors=((0, "broken"),))
    assert outcomes.kinds.tolist() == [Outcome.ERROR, Outcome.TOKENS]
    assert outcomes.counts.tolist() == [0, 1]


def test_error_does_not_hide_that_its_slot_was_released() -> None:
    outcomes = read(np.array([[PREEMPTED_TOKEN_ID], [4]], np.int32), errors=((0, "broken"),))
    assert outcomes.kinds.tolist() == [Outcome.RELEASED, Outcome.TOKENS]
