"""Contract of the core drafters that read only texts, over the start, continuation and end of requests in slots."""

from __future__ import annotations

import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.config import SpeculativeConfig
from fd_core.errors import ConfigError
from fd_core.runner.builtin import fd_register_drafters
from fd_core.runner.drafting import Drafter, check_drafter
from tests.runner.drafters import LIMITS, extend, ids, make, propose


def load(target: str) -> type[Drafter]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


KINDS = {entry.name: kind for entry in fd_register_drafters() if not (kind := load(entry.target)).reads_states}
LONGEST, VOCABULARY = LIMITS["max_model_len"], LIMITS["vocab_size"]
TOKENS = st.integers(0, 2)
DELIVERIES = st.fixed_dictionaries({}, optional={slot: st.tuples(st.integers(0, 5), TOKENS) for slot in range(4)})
RESIDENCIES = st.tuples(st.integers(0, 3), st.lists(TOKENS, min_size=1, max_size=30))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@settings(max_examples=40, deadline=None)
@given(st.lists(RESIDENCIES | DELIVERIES, min_size=1, max_size=12), st.integers(1, 5))
def test_proposals_depend_only_on_the_text(kind: type[Drafter], events: list, limit: int) -> None:
    """Each step accepts the first drafts of each slot and adds another token; a fresh drafter agrees every time."""
    drafter = make(kind)
    texts: dict[int, list[int]] = {}
    drafts: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, tuple):
            slot, text = event
            texts[slot], drafts[slot] = list(text), []
            drafter.admit(slot, ids(text))
            continue
        more = {slot: [*drafts[slot][:kept], own] for slot, (kept, own) in event.items() if slot in texts}
        more = {slot: given for slot, given in more.items() if len(texts[slot]) + len(given) <= LONGEST}
        if not more:
            continue
        extend(drafter, more)
        for slot, delivered in more.items():
            texts[slot] += delivered
        for slot, guess in zip(more, propose(drafter, list(more), limit), strict=True):
            fresh = make(kind)
            fresh.admit(0, ids(texts[slot]))
            assert [guess] == propose(fresh, [0], limit)
            assert all(0 <= token < VOCABULARY for token in guess)
            drafts[slot] = guess


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_text_exceeding_context_is_truncated_like_the_runner(kind: type[Drafter]) -> None:
    drafter = make(kind)
    drafter.admit(0, ids([1, 2] * (LONGEST // 2 - 1)))
    extend(drafter, {0: [1, 2, 1, 2]})
    assert len(propose(drafter, [0], 3)[0]) <= 3


@pytest.mark.parametrize("method", KINDS)
def test_unused_drafter_option_is_rejected(method: str) -> None:
    model = "some" if KINDS[method].uses_model else None
    fine = SpeculativeConfig(method=method, model=model, options=dict.fromkeys(KINDS[method].options, 3))
    check_drafter(KINDS[method], fine)
    with pytest.raises(ConfigError, match="does not support depth"):
        check_drafter(KINDS[method], SpeculativeConfig(method=method, model=model, options={"depth": 3}))
    with pytest.raises(ConfigError, match="draft model"):
        other = None if model else "some"
        check_drafter(KINDS[method], SpeculativeConfig(method=method, model=other))


@pytest.mark.parametrize("value", [0, -1, "two", 1.5])
def test_non_numeric_option_is_rejected(value: float | str) -> None:
    with pytest.raises(ConfigError, match="min_match"):
        make(KINDS["suffix"], min_match=value)  # type: ignore[arg-type]
