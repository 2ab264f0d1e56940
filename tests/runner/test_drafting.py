"""Drafters that search the text find what followed an earlier occurrence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.config import SpeculativeConfig
from fd_core.errors import ConfigError
from fd_core.runner.drafting import Drafter, check_drafter
from fd_core.runner.drafting.lookup import NgramDrafter, SuffixDrafter
from tests.runner.drafters import ids, make, propose

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def longest_earlier_suffix(text: list[int]) -> tuple[int, int]:
    """Return length of, and position after, the first earlier occurrence, by brute force."""
    for length in range(len(text) - 1, 0, -1):
        for start in range(len(text) - length):
            if text[start : start + length] == text[-length:]:
                return length, start + length
    return 0, 0


@given(TEXTS, st.integers(1, 5))
def test_suffix_finds_longest_match(text: list[int], limit: int) -> None:
    drafter = make(SuffixDrafter, min_match=1)
    drafter.admit(0, ids(text))
    length, position = longest_earlier_suffix(text)
    expected = text[position : position + limit] if length else []
    assert propose(drafter, [0], limit) == [expected]


@given(TEXTS, st.integers(1, 5))
def test_ngram_uses_latest_occurrence_of_longest_gram(text: list[int], limit: int) -> None:
    drafter = make(NgramDrafter, prompt_lookup_max=3, prompt_lookup_min=1)
    drafter.admit(0, ids(text))
    expected: list[int] = []
    for size in (3, 2, 1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if ends and len(text) >= size:
            expected = text[ends[-1] : ends[-1] + limit]
            break
    assert propose(drafter, [0], limit) == [expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_max": 10**9}, "from 1 to 32 for prompt_lookup_max, got 1000000000"),
        ({"prompt_lookup_max": 3, "prompt_lookup_min": 4}, "from 1 to 3 for prompt_lookup_min, got 4"),
    ],
)
def test_sizes_of_grams_that_cost_too_much_or_never_occur_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(NgramDrafter, **options)


def test_longest_gram_of_one_token_drafts() -> None:
    drafter = make(NgramDrafter, prompt_lookup_max=1)
    drafter.admit(0, ids([5, 6, 5]))
    assert propose(drafter, [0], 2) == [[6, 5]]


@pytest.mark.parametrize("kind", [NgramDrafter, SuffixDrafter])
def test_unused_drafter_option_is_rejected(kind: type[Drafter]) -> None:
    check_drafter(kind, SpeculativeConfig(method="mine", options=dict.fromkeys(kind.options, 3)))
    with pytest.raises(ConfigError, match="does not support depth"):
        check_drafter(kind, SpeculativeConfig(method="mine", options={"depth": 3}))
    with pytest.raises(ConfigError, match="draft model"):
        check_drafter(kind, SpeculativeConfig(method="mine", model="some"))
