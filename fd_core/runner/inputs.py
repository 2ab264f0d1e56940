"""Builds the flattened batch of a step. The step token budget is counted here, where tokens really are."""

from __future__ import annotations

import numpy as np

from fd_core.config import Limits
from fd_core.ops.contract import Ops, StepInput
from fd_core.runner.batch import PersistentBatch
from fd_core.types import IntArray, StepPlan

__all__ = ["BudgetExceeded", "build_inputs", "last_tokens"]


class BudgetExceeded(RuntimeError):
    """A plan computes more tokens than the step token budget allows."""


def last_tokens(plan: StepPlan) -> IntArray:
    """Return int32[R]: for each row that samples, the index of its last token in the flattened batch."""
    ends = np.cumsum(plan.num_tokens, dtype=np.int32) - 1
    rows: IntArray = ends[plan.samples]
    return rows


def build_inputs(plan: StepPlan, batch: PersistentBatch, limits: Limits, ops: Ops) -> StepInput:
    """Gather tokens, positions, cache slots and block tables of the plan's rows.

    Raises `BudgetExceeded` if the plan is larger than the budget, and `RuntimeError` if it reaches beyond the tokens
    that the runner knows.
    """
    counts, starts, slots = plan.num_tokens, plan.starts, plan.slots
    total = int(counts.sum())
    if total > limits.max_num_batched_tokens:
        raise BudgetExceeded(f"step {plan.step} computes {total} tokens; the budget is {limits.max_num_batched_tokens}")
    context = starts + counts
    if (context > batch.length[slots]).any():
        slot = int(slots[context > batch.length[slots]][0])
        raise RuntimeError(f"step {plan.step} computes tokens of slot {slot} that do not exist yet")
    query_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    row_of = np.repeat(np.arange(len(slots), dtype=np.int32), counts)
    positions = np.arange(total, dtype=np.int32) - query_start[row_of] + starts[row_of]
    slot_of = slots[row_of]
    size = batch.block_size
    max_context = int(context.max())
    return StepInput(
        token_ids=ops.from_host(batch.tokens[slot_of, positions]),
        positions=ops.from_host(positions),
        kv_slots=ops.from_host(batch.tables[slot_of, positions // size] * size + positions % size),
        query_start=ops.from_host(query_start),
        context_len=ops.from_host(context),
        block_tables=ops.from_host(batch.tables[slots, : -(-max_context // size)]),
        logits_rows=ops.from_host(last_tokens(plan)),
        max_query=int(counts.max()),
        max_context=max_context,
    )
