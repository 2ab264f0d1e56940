"""Builds the flattened batch of a step. The step token budget is counted here, where tokens really are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fd_core.config import Limits
from fd_core.ops.contract import Ops, StepInput
from fd_core.runner.batch import PersistentBatch
from fd_core.types import IntArray, StepPlan

__all__ = ["BudgetExceeded", "Rows", "Spans", "build_inputs", "resolve_rows"]


class BudgetExceeded(RuntimeError):
    """A plan computes more tokens than the step token budget allows."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Which tokens of which slots a forward computes, and where it yields logits."""

    slots: IntArray
    """int32[n]"""
    starts: IntArray
    """int32[n]"""
    counts: IntArray
    """int32[n], tokens computed, at least 1."""
    logits_rows: IntArray
    """int32[R], indices into the flattened batch."""


@dataclass(frozen=True, slots=True)
class Rows(Spans):
    """The rows of a plan as the runner computes them: real positions, real drafts.

    flattened:   | row 0: chunk . . . | row 1: last token, draft, draft | row 2: last token |
    logits of:                      ^                  ^      ^      ^               ^

    There are 1 + drafts rows of logits for each sampling row, in order.
    """

    sampling: IntArray
    """int32[N], indices of the rows that sample."""
    drafts: IntArray
    """int32[N], drafts that each of them verifies."""
    logits_slots: IntArray
    """int32[R]"""
    positions: IntArray
    """int32[R], position of the token that is chosen from each row of logits."""
    columns: IntArray
    """int32[R], column of the token matrix."""


def resolve_rows(plan: StepPlan, batch: PersistentBatch, limits: Limits) -> Rows:
    """Fix what the plan leaves to the runner: how many drafts there are, and where a row begins.

    A row that samples ends with the last token known, which may lie before the plan's place when drafts of an earlier
    step were rejected. Raises `BudgetExceeded` if the step is larger than the budget, and `RuntimeError` if it reaches
    beyond the tokens that the runner knows.
    """
    slots = plan.slots
    drafts = np.minimum(plan.num_drafts, batch.num_drafts[slots])
    own = plan.num_tokens - plan.num_drafts
    starts = np.where(plan.samples, batch.length[slots] - own, plan.starts)
    counts = own + drafts
    total = int(counts.sum())
    if total > limits.max_num_batched_tokens:
        raise BudgetExceeded(f"step {plan.step} computes {total} tokens; the budget is {limits.max_num_batched_tokens}")
    astray = (starts > plan.starts) | (starts + own > batch.length[slots]) | (starts < 0)
    if astray.any():
        slot = int(slots[astray][0])
        raise RuntimeError(f"step {plan.step} plans tokens of slot {slot} that the runner does not have")
    sampling = np.flatnonzero(plan.samples).astype(np.int32)
    verified = drafts[sampling]
    ends = np.cumsum(counts, dtype=np.int32)[sampling]
    row_of = np.repeat(np.arange(len(sampling)), verified + 1)
    firsts = np.cumsum(verified + 1) - (verified + 1)
    columns = (np.arange(len(row_of)) - firsts[row_of]).astype(np.int32)
    sampled_slots = slots[sampling]
    return Rows(
        slots=slots,
        starts=starts.astype(np.int32),
        counts=counts.astype(np.int32),
        sampling=sampling,
        drafts=verified,
        logits_rows=(ends[row_of] - 1 - verified[row_of] + columns).astype(np.int32),
        logits_slots=sampled_slots[row_of],
        positions=batch.length[sampled_slots][row_of] + columns,
        columns=columns,
    )


def build_inputs(spans: Spans, tokens: IntArray, tables: IntArray, size: int, ops: Ops) -> StepInput:
    """Gather tokens, positions, cache slots and block tables of the spans, at least one.

    `tokens` int32[num_slots, *] and `tables` int32[num_slots, blocks] hold what is known of every slot; `size` is
    the number of tokens in a block.
    """
    slots, counts = spans.slots, spans.counts
    total = int(counts.sum())
    query_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    row_of = np.repeat(np.arange(len(slots), dtype=np.int32), counts)
    positions = np.arange(total, dtype=np.int32) - query_start[row_of] + spans.starts[row_of]
    slot_of = slots[row_of]
    context = spans.starts + counts
    max_context = int(context.max())
    return StepInput(
        token_ids=ops.from_host(tokens[slot_of, positions]),
        positions=ops.from_host(positions),
        kv_slots=ops.from_host(tables[slot_of, positions // size] * size + positions % size),
        query_start=ops.from_host(query_start),
        context_len=ops.from_host(context),
        block_tables=ops.from_host(tables[slots, : -(-max_context // size)]),
        logits_rows=ops.from_host(spans.logits_rows),
        max_query=int(counts.max()),
        max_context=max_context,
    )
