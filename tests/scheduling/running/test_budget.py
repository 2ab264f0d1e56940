"""The token budget is exact, drafts shrink first, and no row starves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.scheduling.running.plan import Budget, allot_decodes

DRAFTS = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(st.integers(0, 40), DRAFTS)
@pytest.mark.law("2")
def test_grants_are_charged_and_stay_within_budget(limit: int, wanted: list[int]) -> None:
    budget = Budget(limit)
    rows, drafts = allot_decodes(budget, np.array(wanted, np.int32), np.zeros(len(wanted), np.int64))
    assert budget.limit - budget.left == len(rows) + drafts.sum() <= limit
    assert (drafts <= np.array(wanted)[rows]).all()


@given(st.integers(0, 40), DRAFTS)
@pytest.mark.law("2.2")
def test_drafts_shrink_before_a_decode_is_skipped(limit: int, wanted: list[int]) -> None:
    rows, drafts = allot_decodes(Budget(limit), np.array(wanted, np.int32), np.zeros(len(wanted), np.int64))
    if len(rows) < len(wanted):
        assert not drafts.any()
    assert len(rows) == min(limit, len(wanted))


@given(st.integers(0, 40), DRAFTS)
def test_budget_remains_only_if_all_demand_is_met(limit: int, wanted: list[int]) -> None:
    budget = Budget(limit)
    _, drafts = allot_decodes(budget, np.array(wanted, np.int32), np.zeros(len(wanted), np.int64))
    if budget.left:
        assert drafts.tolist() == wanted


@given(st.integers(1, 6), st.integers(1, 12))
@pytest.mark.law("2.2")
def test_longest_waiting_rows_go_first(limit: int, count: int) -> None:
    last = np.full(count, -1, np.int64)
    served = np.zeros(count, np.int64)
    for step in range(3 * count):
        rows, _ = allot_decodes(Budget(limit), np.zeros(count, np.int32), last)
        last[rows] = step
        served[rows] += 1
    assert last.min() >= 3 * count - -(-count // limit)
    assert np.ptp(served) <= 1, "rows with constant demand are not served equally"
