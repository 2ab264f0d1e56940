"""Padding never breaks the step token budget."""

from __future__ import annotations

import pytest
from fd_core.config import Limits
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from fd_gpu_cuda.graphs import GraphShapes


def shapes(max_num_seqs: int, budget: int, max_drafts: int = 0, *, context: int = 1000) -> GraphShapes:
    return GraphShapes.of(
        Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=context,
            block_size=16,
            num_kv_blocks=1000,
            vocab_size=100,
            max_drafts=max_drafts,
        )
    )


LIMITS = st.builds(
    lambda rows, drafts, more: (rows, 1 + drafts + more, drafts),
    st.integers(1, 2000),
    st.integers(0, 9),
    st.integers(0, 2000),
)


def test_sizes_grow_by_doubling_then_by_steps() -> None:
    assert shapes(32, 2048).single == (1, 2, 4, 8, 16, 24, 32)
    assert shapes(30, 2048).single[-3:] == (16, 24, 30)
    assert shapes(256, 2048).single[-6:] == (120, 128, 160, 192, 224, 256)


def test_drafts_double_the_rows_up_to_the_memory_bound() -> None:
    assert shapes(256, 2048).drafted == ()
    assert shapes(256, 2048, 3).drafted == (1, 2, 4, 8, 16, 32, 64)
    assert shapes(20, 2048, 3).drafted == (1, 2, 4, 8, 16, 20)
    assert shapes(256, 12, 3).drafted == (1, 2, 3)
    assert shapes(256, 2048, 8).drafted[-1] == 28


def test_rows_are_no_longer_than_the_context() -> None:
    """Graphs are captured with positions from 0, which rope and block tables have only up to there."""
    assert max(width for _, width in shapes(4, 64, 9, context=8)) == 8
    assert {width for _, width in shapes(4, 64, 9, context=1)} == {1}


@given(LIMITS)
def test_shape_holds_its_step_and_fits_the_budget(limits: tuple[int, int, int]) -> None:
    found = shapes(*limits)
    for rows in range(1, min(limits[0], 300) + 1):
        for width in range(1, limits[2] + 3):
            shape = found.fitting(rows, width)
            if shape is not None:
                assert shape[0] >= rows and shape[1] >= width and shape[0] * shape[1] <= limits[1]
                assert shape in list(found) and shape[0] * shape[1] <= found.most_tokens


@given(LIMITS)
def test_decode_without_drafts_is_padded_to_at_most_twice_its_rows(
    limits: tuple[int, int, int],
) -> None:
    found = shapes(*limits)
    for rows in range(1, min(*limits[:2], 512) + 1):
        shape = found.fitting(rows, 1)
        assert shape is not None and shape[0] <= 2 * rows


@given(LIMITS)
def test_largest_shape_is_first(limits: tuple[int, int, int]) -> None:
    tokens = [rows * width for rows, width in shapes(*limits)]
    assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize(("rows", "width"), [(513, 1), (700, 1), (65, 2), (1, 5)])
def test_steps_beyond_the_largest_shape_are_not_padded(rows: int, width: int) -> None:
    assert shapes(1000, 4000, 3).fitting(rows, width) is None
