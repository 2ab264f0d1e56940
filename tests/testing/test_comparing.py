"""Comparisons of the kit name the first or the largest difference with the expected and the actual value."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.testing.models.arrays import assert_same, assert_within


def test_equal_arrays_pass_with_nan_and_infinity() -> None:
    values = np.array([[1.0, np.nan], [-np.inf, np.inf]])
    assert_same(values, values.copy())
    assert_within(values[1], values[1], atol=0.0)
    assert_within([0.1], [0.2], atol=0.11)
    assert_same([], [])


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        ([1, 2, 3], [1, 5, 4], r"logits at 1 of \(3,\): expected 5, got 2; 2 of 3 differ"),
        ([[1, 2], [3, 4]], [[1, 2], [0, 4]], r"logits at \(1, 0\) of \(2, 2\): expected 0, got 3; 1 of 4 differ"),
        ([1.0], [np.nan], r"expected nan, got 1.0"),
        ([1, 2], [1, 2, 3], r"logits: expected the shape \(3,\), got \(2,\)"),
    ],
)
def test_first_difference_is_named(found: list[float], expected: list[float], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same(found, expected, "logits")


@pytest.mark.parametrize("wrong", [0.5, np.nan, np.inf])
def test_largest_difference_is_named(wrong: float) -> None:
    with pytest.raises(AssertionError, match=r"result at \(1,\) of \(2,\): expected 2, got .*: off by .*, allowed 0.1"):
        assert_within([1.01, wrong], [1.0, 2.0], atol=0.1)
