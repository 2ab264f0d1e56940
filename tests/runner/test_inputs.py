"""The runner counts what it computes, and trusts no plan for tokens that it does not have."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.config import Limits
from fd_core.runner.batch import PersistentBatch
from fd_core.runner.inputs import BudgetExceeded, resolve_rows
from fd_core.types import Admission, SamplingParams, StepPlan

LIMITS = Limits(
    max_num_seqs=3,
    max_num_batched_tokens=6,
    max_model_len=32,
    block_size=4,
    num_kv_blocks=24,
    vocab_size=50,
    max_drafts=3,
)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def admission(slot: int, length: int) -> Admission:
    return Admission(
        slot=slot,
        gen=1,
        token_ids=np.arange(length, dtype=np.int32),
        prompt_len=length,
        params=SamplingParams(),
        eos_token_ids=(),
        computed=0,
    )


def batch(*drafts: int, length: int = 5) -> PersistentBatch:
    """Slots with `length` tokens each, followed by that many guesses."""
    result = PersistentBatch(LIMITS)
    for slot in range(len(drafts)):
        result.admit(admission(slot, length))
    slots = np.arange(len(drafts), dtype=np.int32)
    result.guess(slots, np.full((len(drafts), LIMITS.max_drafts), 9, np.int32), ids(*drafts))
    return result


def plan(starts: list[int], num_tokens: list[int], num_drafts: list[int]) -> StepPlan:
    count = len(starts)
    return StepPlan(
        epoch=1,
        step=0,
        slots=np.arange(count, dtype=np.int32),
        gens=np.ones(count, np.int32),
        starts=ids(*starts),
        num_tokens=ids(*num_tokens),
        num_drafts=ids(*num_drafts),
        samples=np.ones(count, np.bool_),
    )


def test_a_step_above_the_budget_is_refused_where_its_tokens_are_counted() -> None:
    full = plan([4, 4], [3, 3], [2, 2])
    assert resolve_rows(full, batch(2, 2), LIMITS).counts.sum() == 6
    with pytest.raises(BudgetExceeded, match="computes 7 tokens; the budget is 6"):
        resolve_rows(plan([4, 4], [4, 3], [3, 2]), batch(3, 2), LIMITS)


def test_drafts_that_the_runner_does_not_have_are_not_computed() -> None:
    rows = resolve_rows(plan([4, 4], [3, 3], [2, 2]), batch(1, 0), LIMITS)
    assert (rows.counts.tolist(), rows.drafts.tolist()) == ([2, 1], [1, 0])
    assert rows.positions.tolist() == [5, 6, 5]
    assert rows.columns.tolist() == [0, 1, 0]
    assert rows.logits_rows.tolist() == [0, 1, 2]


def test_a_row_begins_behind_what_was_really_kept() -> None:
    rows = resolve_rows(plan([7], [1], [0]), batch(0), LIMITS)
    assert rows.starts.tolist() == [4]


def test_tokens_beyond_the_known_ones_are_refused() -> None:
    with pytest.raises(RuntimeError, match="does not have"):
        resolve_rows(plan([3], [1], [0]), batch(0), LIMITS)


def test_a_new_stay_has_no_drafts() -> None:
    slots = batch(3)
    slots.admit(admission(0, 2))
    assert slots.num_drafts.tolist() == [0, 0, 0]
    assert resolve_rows(plan([1], [3], [2]), slots, LIMITS).drafts.tolist() == [0]
