"""Warm-up steps of a runner, before the first request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from fd_core.config import Limits
from fd_core.ops.warm_up import WarmUpRow, WarmUpStep
from fd_core.types import Admission, BlockGrant, IntArray, SamplingParams, StepPlan


def warm_up_plans(limits: Limits, length: int, more: Sequence[WarmUpStep] = ()) -> tuple[StepPlan, ...]:
    """Return a prefill of `length` tokens in slot 0 and, unless prompts are whole, a decode after it, then the steps
    that a pack requests.

    All requests share the blocks 0 and up, which are overwritten. Steps beyond the limits are omitted.
    """
    plans = list(_plans((WarmUpRow(length),), 0, limits))
    if limits.whole_prompts:
        return tuple(plans)
    plans.append(decode_plan(1, plans[0].slots, plans[0].gens, starts=plans[0].num_tokens))
    for rows in more:
        if _fits(rows, limits):
            plans.extend(_plans(rows, len(plans), limits))
    return tuple(plans)


def prefill_plan(
    step: int,
    gen: int,
    lengths: IntArray,
    params: Iterable[SamplingParams],
    tables: Iterable[IntArray],
    computed: int = 0,
) -> StepPlan:
    """Return a step that admits a prompt of each length, in slots from 0 on, and computes it in one chunk.

    The first `computed` tokens of each prompt are computed already.
    """
    rows = np.arange(len(lengths), dtype=np.int32)
    return StepPlan(
        epoch=0,
        step=step,
        slots=rows,
        gens=np.full_like(rows, gen),
        starts=np.full_like(rows, computed),
        num_tokens=lengths - computed,
        num_drafts=np.zeros_like(rows),
        samples=np.ones(len(rows), np.bool_),
        admissions=tuple(
            Admission(slot, gen, np.zeros(length, np.int32), length, each, eos_token_ids=(), computed=computed)
            for slot, (length, each) in enumerate(zip(lengths.tolist(), params, strict=True))
        ),
        grants=tuple(BlockGrant(slot, 0, table) for slot, table in enumerate(tables)),
    )


def decode_plan(step: int, slots: IntArray, gens: IntArray, starts: IntArray, drafts: int = 0) -> StepPlan:
    """Return a step that computes one token per request, and drafts."""
    return StepPlan(
        epoch=0,
        step=step,
        slots=slots,
        gens=gens,
        starts=starts,
        num_tokens=np.full_like(slots, 1 + drafts),
        num_drafts=np.full_like(slots, drafts),
        samples=np.ones(len(slots), np.bool_),
    )


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
    """Yield a step that admits and computes requests, and another one if they have drafts."""
    lengths, drafts = np.array([row.tokens for row in rows], np.int32), rows[0].drafts
    counts = (-(-(row.tokens + 1 + row.drafts) // limits.block_size) for row in rows)
    # Layers with windows may have fewer blocks than a sequence has; the results do not matter.
    tables = (np.arange(count, dtype=np.int32) % limits.num_kv_blocks for count in counts)
    first = prefill_plan(step, step, lengths, params=(row.params for row in rows), tables=tables)
    yield first
    if drafts:
        yield decode_plan(step + 1, first.slots, first.gens, starts=lengths, drafts=drafts)
