"""Draft acceptance is counted by position, and requests with rejected drafts get fewer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fd_core.scheduling.running.drafts import DraftControl

MAX_DRAFTS = 4
verified = st.integers(0, MAX_DRAFTS).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))


@given(st.lists(st.lists(verified, min_size=1, max_size=6), max_size=8))
def test_acceptance_is_counted_by_draft_position(steps: list[list[tuple[int, int]]]) -> None:
    control = DraftControl(num_slots=6, max_drafts=MAX_DRAFTS, cheap_tokens=100)
    for step in steps:
        drafted, accepted = np.array(step, np.int32).T
        control.observe(np.arange(len(step)), drafted, accepted)
    pairs = [pair for step in steps for pair in step]
    for position in range(MAX_DRAFTS):
        assert control.stats().proposed_per_position[position] == sum(drafted > position for drafted, _ in pairs)
        assert control.stats().accepted_per_position[position] == sum(accepted > position for _, accepted in pairs)


def test_rejected_drafts_shrink_and_reset_for_next_request() -> None:
    control = DraftControl(num_slots=2, max_drafts=MAX_DRAFTS, cheap_tokens=100)
    both = np.arange(2)
    ready = np.full(2, MAX_DRAFTS, np.int32)
    for _ in range(30):
        control.observe(both, ready, np.array([0, MAX_DRAFTS], np.int32))
    assert control.allowed(both, ready).tolist() == [0, MAX_DRAFTS]
    control.admit(0)
    assert control.allowed(both, ready).tolist() == [MAX_DRAFTS, MAX_DRAFTS]
