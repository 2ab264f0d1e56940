"""Failures of comparisons name the first difference, however long the values are."""

import pytest

LENGTH = 20_000


@pytest.mark.parametrize("make", [list, lambda values: b"".join(value.to_bytes(4) for value in values)])
def test_long_values_are_not_compared_element_by_element(make, monkeypatch):
    monkeypatch.setenv("CI", "true")  # pytest then shows whole differences, which takes minutes
    ours, theirs = make(range(LENGTH)), make(range(1, LENGTH + 1))
    with pytest.raises(AssertionError) as failure:
        assert ours == theirs
    text = str(failure.value)
    assert "At index" in text
    assert "Full diff" not in text


def test_short_values_are_compared_in_full(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match="Full diff"):
        assert list(range(20)) == list(range(1, 21))
