"""The drafts that are compared are about subjects from which no head has learned."""

from __future__ import annotations

import pytest

from benchmarks.drafts import KINDS, METHODS, prompts
from fd_core.config import SpeculativeConfig


@pytest.mark.parametrize("kind", KINDS)
def test_no_prompt_of_the_comparison_is_learned_from(kind: str) -> None:
    compared, learned = ({*prompts(kind, held_out=held_out)} for held_out in (True, False))
    assert len(compared) > 4 and len(learned) > 4
    assert not compared & learned


def test_each_method_has_settings_that_engines_accept() -> None:
    assert [name for name, given in METHODS.items() if given is None] == ["none"]
    for given in METHODS.values():
        assert given is None or SpeculativeConfig(**given).num_speculative_tokens > 0
