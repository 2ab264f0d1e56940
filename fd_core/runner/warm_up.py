"""The first steps of a runner, which no request waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fd_core.config import Limits
from fd_core.ops.warm_up import WarmUpRow, WarmUpStep
from fd_core.types import Admission, BlockGrant, IntArray, StepPlan


def warm_up_plans(limits: Limits, length: int, more: Sequence[WarmUpStep] = ()) -> tuple[StepPlan, ...]:
    """Return a prefill of `length` tokens in slot 0 and a decode behind it, then what else a pack wants.

    All requests share the blocks 0 and up, which are overwritten. Steps beyond the limits are left out.
    """
    plans = list(_plans((WarmUpRow(length),), 0, limits))
    plans.append(_decode(plans[0], 0, 1))
    for rows in more:
        if _fits(rows, limits):
            plans.extend(_plans(rows, len(plans), limits))
    return tuple(plans)


def _fits(rows: WarmUpStep, limits: Limits) -> bool:
    drafts = {row.drafts for row in rows}
    return (
        0 < len(rows) <= limits.max_num_seqs
        and len(drafts) == 1
        and max(drafts) <= limits.max_drafts
        and max(sum(row.tokens for row in rows), sum(1 + row.drafts for row in rows)) <= limits.max_num_batched_tokens
        and all(row.tokens + 1 + row.drafts <= limits.max_model_len for row in rows)
    )


def _plans(rows: WarmUpStep, step: int, limits: Limits) -> Iterator[StepPlan]:
    """Return a step that admits and computes requests, and another one if they have drafts."""
    size = limits.block_size
    blocks = [np.arange(-(-(row.tokens + 1 + row.drafts) // size), dtype=np.int32) for row in rows]
    first = StepPlan(
        epoch=0,
        step=step,
        slots=np.arange(len(rows), dtype=np.int32),
        gens=np.full(len(rows), step, np.int32),
        starts=np.zeros(len(rows), np.int32),
        num_tokens=_column(row.tokens for row in rows),
        num_drafts=np.zeros(len(rows), np.int32),
        samples=np.ones(len(rows), np.bool_),
        admissions=tuple(
            Admission(slot, step, np.zeros(row.tokens, np.int32), row.tokens, row.params, eos_token_ids=(), computed=0)
            for slot, row in enumerate(rows)
        ),
        grants=tuple(BlockGrant(slot, 0, own) for slot, own in enumerate(blocks)),
    )
    yield first
    if rows[0].drafts:
        yield _decode(first, rows[0].drafts, step + 1)


def _decode(before: StepPlan, drafts: int, step: int) -> StepPlan:
    """Return the step behind another one: a token of each of its requests, and drafts."""
    count = len(before.slots)
    return StepPlan(
        epoch=0,
        step=step,
        slots=before.slots,
        gens=before.gens,
        starts=before.num_tokens,
        num_tokens=np.full(count, 1 + drafts, np.int32),
        num_drafts=np.full(count, drafts, np.int32),
        samples=before.samples,
    )


def _column(values: Iterator[int]) -> IntArray:
    return np.array(list(values), np.int32)
