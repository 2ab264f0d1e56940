"""Padding never breaks the step token budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_gpu_cuda.sizes import graph_sizes, padded

LIMITS = st.tuples(st.integers(1, 2000), st.integers(1, 2000))


def test_sizes_grow_by_doubling_then_by_steps() -> None:
    assert graph_sizes(32, 2048) == (1, 2, 4, 8, 16, 24, 32)
    assert graph_sizes(30, 2048)[-3:] == (16, 24, 30)
    assert graph_sizes(256, 2048)[-6:] == (112, 120, 128, 160, 192, 224, 256)[-6:]


@given(LIMITS)
def test_a_decode_that_fits_the_budget_fits_it_padded(limits: tuple[int, int]) -> None:
    sizes = graph_sizes(*limits)
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, min(limits) + 1):
        assert rows <= padded(rows, sizes) <= min(limits)


@given(LIMITS)
def test_at_most_as_many_rows_are_added_as_there_are(limits: tuple[int, int]) -> None:
    sizes = graph_sizes(*limits)
    assert all(padded(rows, sizes) <= 2 * rows for rows in range(1, min(limits) + 1))


@pytest.mark.parametrize("rows", [513, 700])
def test_decodes_beyond_the_largest_graph_are_not_padded(rows: int) -> None:
    assert padded(rows, graph_sizes(1000, 4000)) == rows
