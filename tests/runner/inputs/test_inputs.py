"""The runner counts what it computes, and does not trust plans for tokens that it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fd_core.backends.null import NullModel
from fd_core.config import Limits
from fd_core.ops.contract import Array, HostCopies, KVCache, StepInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.runner.batch import PersistentBatch
from fd_core.runner.inputs.inputs import BudgetExceeded, resolve_rows
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.runner.runner import Runner
from fd_core.types import Admission, BlockGrant, Revocation, SamplingParams, StepPlan

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
    """Return slots with `length` tokens each, followed by the given number of draft tokens."""
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


def test_step_above_budget_is_rejected_when_counting_tokens() -> None:
    full = plan([4, 4], [3, 3], [2, 2])
    assert resolve_rows(full, batch(2, 2), LIMITS).counts.sum() == 6
    with pytest.raises(BudgetExceeded, match="computes 7 tokens, over the budget 6"):
        resolve_rows(plan([4, 4], [4, 3], [3, 2]), batch(3, 2), LIMITS)


def test_missing_drafts_are_not_computed() -> None:
    rows = resolve_rows(plan([4, 4], [3, 3], [2, 2]), batch(1, 0), LIMITS)
    assert (rows.counts.tolist(), rows.drafts.tolist()) == ([2, 1], [1, 0])
    assert rows.positions.tolist() == [5, 6, 5]
    assert rows.columns.tolist() == [0, 1, 0]
    assert rows.logits_rows.tolist() == [0, 1, 2]


def test_row_starts_after_accepted_tokens() -> None:
    rows = resolve_rows(plan([7], [1], [0]), batch(0), LIMITS)
    assert rows.starts.tolist() == [4]


def test_tokens_beyond_known_ones_are_rejected() -> None:
    with pytest.raises(RuntimeError, match="beyond those"):
        resolve_rows(plan([3], [1], [0]), batch(0), LIMITS)


def test_new_request_in_slot_has_no_drafts() -> None:
    slots = batch(3)
    slots.admit(admission(0, 2))
    assert slots.num_drafts.tolist() == [0, 0, 0]
    assert resolve_rows(plan([1], [3], [2]), slots, LIMITS).drafts.tolist() == [0]


def test_token_zero_is_a_valid_draft() -> None:
    rows = batch(0, length=5)
    rows.guess(ids(0), np.array([[0, 0, 7]], np.int32), ids(3))
    assert rows.num_drafts[0] == 3
    assert rows.tokens[0, 5:8].tolist() == [0, 0, 7]


class Counting(NumpyOps):
    """Counts how often the host waits for the device."""

    waits = 0

    def fetch_later(self, arrays: Sequence[Array]) -> HostCopies:
        self.waits += 1
        return HostCopies([np.asarray(array) for array in arrays])

    def to_host(self, array: Array) -> np.ndarray:
        raise AssertionError("a step waits for the device apart from `fetch_later`")


def test_step_with_penalties_and_logprobs_syncs_once() -> None:
    ops = Counting()

    class Model(NullModel):
        def forward(self, step: StepInput, cache: KVCache) -> Array:
            return np.zeros((len(step.logits_rows), 50), np.float32)

    runner = Runner(ops, Model(vocab_size=50), LIMITS, NumpyPostprocess)
    params = SamplingParams(temperature=0.7, top_p=0.9, logprobs=2, presence_penalty=0.5, repetition_penalty=1.1)
    admitted = replace(admission(0, 3), params=params)
    grant = BlockGrant(0, 0, ids(0, 1))
    runner.execute(replace(plan([0], [3], [0]), admissions=(admitted,), grants=(grant,)))
    output = runner.execute(replace(plan([3], [1], [0]), step=1, revocations=(Revocation(1, 1),)))
    assert output.logprobs is not None
    assert ops.waits == 2
