"""Builds the flattened batch of a step. The step token budget is counted here, where tokens really are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fd_core.config import Limits
from fd_core.ops.contract import HostStep, Ops, StepInput
from fd_core.runner.batch import PersistentBatch
from fd_core.types import IntArray, StepPlan

__all__ = ["BudgetExceeded", "Rows", "Spans", "adapter_rows", "build_inputs", "resolve_rows"]


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
    padding: int = field(default=0, kw_only=True)
    """Rows of one token that only fill the step up; they stand behind the others."""


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

    def cells(self, width: int) -> IntArray:
        """Return int32[N, width], the row of logits behind each cell of the sampling rows; the last one repeats."""
        if not self.drafts.any():
            return np.repeat(np.arange(len(self.drafts), dtype=np.int32), width).reshape(-1, width)
        firsts = np.cumsum(self.drafts + 1) - (self.drafts + 1)
        return (firsts[:, None] + np.minimum(np.arange(width), self.drafts[:, None])).astype(np.int32)


def resolve_rows(
    plan: StepPlan, batch: PersistentBatch, limits: Limits, padded_rows: Callable[[int], int] | None = None
) -> Rows:
    """Fix what the plan leaves to the runner: how many drafts there are, and where a row begins.

    A row that samples ends with the last token known, which may lie before the plan's place when drafts of an earlier
    step were rejected. A step of single tokens is padded to as many rows as `padded_rows` says, and charged for them.
    Raises `BudgetExceeded` if the step is larger than the budget, and `RuntimeError` if it reaches beyond the tokens
    that the runner knows.
    """
    slots = plan.slots
    drafts = np.minimum(plan.num_drafts, batch.num_drafts[slots])
    own = plan.num_tokens - plan.num_drafts
    starts = np.where(plan.samples, batch.length[slots] - own, plan.starts)
    counts = own + drafts
    padding = 0
    if padded_rows is not None and len(counts) and (counts == 1).all():
        padding = padded_rows(len(counts)) - len(counts)
    total = int(counts.sum()) + padding
    if total > limits.max_num_batched_tokens:
        raise BudgetExceeded(f"step {plan.step} computes {total} tokens; the budget is {limits.max_num_batched_tokens}")
    astray = (starts > plan.starts) | (starts + own > batch.length[slots]) | (starts < 0)
    if astray.any():
        slot = int(slots[astray][0])
        raise RuntimeError(f"step {plan.step} plans tokens of slot {slot} that the runner does not have")
    sampling = plan.samples.nonzero()[0].astype(np.int32)
    verified = drafts[sampling]
    ends = np.cumsum(counts, dtype=np.int32)[sampling]
    row_of, columns = _rows_and_columns(verified)
    sampled_slots = slots[sampling]
    return Rows(
        slots=slots,
        starts=starts,
        counts=counts,
        sampling=sampling,
        drafts=verified,
        logits_rows=ends[row_of] - 1 - verified[row_of] + columns,
        logits_slots=sampled_slots[row_of],
        positions=batch.length[sampled_slots][row_of] + columns,
        columns=columns,
        padding=padding,
    )


def _rows_and_columns(drafts: IntArray) -> tuple[IntArray, IntArray]:
    """Return int32[R] each: for every row of logits, which of the N rows with `drafts` it is of, and its column."""
    rows = np.arange(len(drafts), dtype=np.int32)
    if not drafts.any():
        return rows, np.zeros(len(drafts), np.int32)
    firsts = np.cumsum(drafts + 1, dtype=np.int32) - (drafts + 1)
    row_of = np.repeat(rows, drafts + 1)
    return row_of, np.arange(len(row_of), dtype=np.int32) - firsts[row_of]


def build_inputs(
    spans: Spans,
    tokens: IntArray,
    tables: IntArray,
    size: int,
    ops: Ops,
    spare_block: int | None = None,
    adapters: IntArray | None = None,
) -> StepInput:
    """Gather tokens, positions, cache slots and block tables of the spans, at least one.

    `tokens` int32[num_slots, *] and `tables` int32[num_slots, blocks] hold what is known of every slot; `size` is
    the number of tokens in a block; `spare_block` is the block that padding rows read and write.
    `adapters` has the place of each slot's adapter, int32[num_slots]; None if none of these slots has one.
    """
    slots, counts = spans.slots, spans.counts
    total = int(counts.sum())
    if total == len(slots):  # one token each
        query_start = np.arange(total + 1, dtype=np.int32)
        positions, slot_of = spans.starts, slots
    else:
        query_start = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        row_of = np.repeat(np.arange(len(slots), dtype=np.int32), counts)
        positions = np.arange(total, dtype=np.int32) - query_start[row_of] + spans.starts[row_of]
        slot_of = slots[row_of]
    context = spans.starts + counts
    max_context = int(context.max())
    more, spare = spans.padding, 0 if spare_block is None else spare_block
    if more and spare_block is None:
        raise RuntimeError(f"the pack {ops.name} pads steps, but its KV cache has no spare block")
    entries, offsets = np.divmod(positions, size)
    kv_slots = tables[slot_of, entries] * size + offsets
    host = HostStep(
        query_start=np.concatenate([query_start, np.arange(total + 1, total + more + 1, dtype=np.int32)])
        if more
        else query_start,
        context_len=_padded(context, more, 1),
        block_tables=_padded(tables[slots, : -(-max_context // size)], more, spare),
    )
    return StepInput(
        token_ids=ops.from_host(_padded(tokens[slot_of, positions], more, 0)),
        positions=ops.from_host(_padded(positions, more, 0)),
        kv_slots=ops.from_host(_padded(kv_slots, more, spare * size)),
        query_start=ops.from_host(host.query_start),
        context_len=ops.from_host(host.context_len),
        block_tables=ops.from_host(host.block_tables),
        logits_rows=ops.from_host(spans.logits_rows),
        max_query=int(counts.max()),
        max_context=max_context,
        host=host,
        **({} if adapters is None else adapter_rows(_padded(adapters[slot_of], more, 0), ops)),
    )


def adapter_rows(places: IntArray, ops: Ops) -> dict[str, Any]:
    """Return the fields of `StepInput` that tell the place of each token's adapter, int32[T]."""
    hit = np.unique(places[places > 0]).tolist()
    groups = tuple((place, ops.from_host(np.flatnonzero(places == place).astype(np.int32))) for place in hit)
    return {"lora_places": ops.from_host(places), "lora_groups": groups}


def _padded(array: IntArray, more: int, value: int) -> IntArray:
    """Return the array with `more` rows of `value` behind it."""
    return np.concatenate([array, np.full((more, *array.shape[1:]), value, array.dtype)]) if more else array
