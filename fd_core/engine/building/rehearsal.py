"""A rehearsal: the largest steps that the settings allow, so that a backend can measure what they take."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import numpy as np

from fd_core.config import Limits
from fd_core.runner.runner import Runner
from fd_core.types import Admission, BlockGrant, IntArray, SamplingParams, StepPlan

_BLOCKS: Final = 16
"""KV blocks of a rehearsal; all tables lead to them, so what is computed means nothing."""
_COSTLY: Final = SamplingParams(
    temperature=0.8, top_k=1000, top_p=0.9, min_p=0.01, seed=1, presence_penalty=0.1, repetition_penalty=1.1, logprobs=1
)


@contextmanager
def rehearsed(make: Callable[[Limits], Runner], limits: Limits, *, adapters: bool = False) -> Iterator[None]:
    """Compute the largest steps with a small cache on entering, and give back what they hold on leaving.

    They are: one prompt as long as a step can be, of which log-probabilities are wanted; a prompt in every slot, all of
    which sample with filters, penalties and log-probabilities; a decode of all slots; the same with drafts. Backends
    that record their forward do so at the decodes, and beforehand for tokens with adapters if there may be `adapters`.
    """
    runner = make(msgspec.structs.replace(limits, num_kv_blocks=min(_BLOCKS, limits.num_kv_blocks)))
    if adapters:
        runner.adapters.prepare()
    for plan in _plans(runner):
        runner.execute(plan)
    try:
        yield
    finally:
        runner.close()
        del runner
        gc.collect()


def _plans(runner: Runner) -> Iterator[StepPlan]:
    limits = runner.limits
    budget, longest = limits.max_num_batched_tokens, limits.max_model_len - 1
    scored = msgspec.structs.replace(_COSTLY, prompt_logprobs=1)
    yield _prefill(limits, 0, np.full(1, max(1, min(budget, longest)), np.int32), scored)
    rows = min(limits.max_num_seqs, budget)
    lengths = np.full(rows, max(1, min(budget // rows, longest // 2)), np.int32)
    yield _prefill(limits, 1, lengths, _COSTLY)
    slots = np.arange(rows, dtype=np.int32)
    yield _decode(runner, 2, slots, 0)
    if limits.max_drafts:
        width = 1 + limits.max_drafts
        some = slots[: max(1, budget // width)]
        guesses = np.zeros((len(some), limits.max_drafts), np.int32)
        runner.batch.guess(some, guesses, np.full(len(some), limits.max_drafts, np.int32))
        yield _decode(runner, 3, some, limits.max_drafts)


def _prefill(limits: Limits, step: int, lengths: IntArray, params: SamplingParams) -> StepPlan:
    """Admit a prompt of each length, in the slots from 0 on, and compute it as a whole."""
    rows = np.arange(len(lengths), dtype=np.int32)
    zeros, gens = np.zeros_like(rows), np.full_like(rows, 1 + step)
    table = np.arange(limits.blocks_per_seq, dtype=np.int32) % limits.num_kv_blocks
    admissions = tuple(
        Admission(row, 1 + step, np.zeros(length, np.int32), length, params, eos_token_ids=(), computed=0)
        for row, length in enumerate(lengths.tolist())
    )
    return StepPlan(
        epoch=0,
        step=step,
        slots=rows,
        gens=gens,
        starts=zeros,
        num_tokens=lengths,
        num_drafts=zeros,
        samples=np.ones(len(rows), np.bool_),
        admissions=admissions,
        grants=tuple(BlockGrant(row, 0, table) for row in rows.tolist()),
    )


def _decode(runner: Runner, step: int, slots: IntArray, drafts: int) -> StepPlan:
    ones = np.ones_like(slots)
    return StepPlan(
        epoch=0,
        step=step,
        slots=slots,
        gens=runner.batch.gen[slots],
        starts=runner.batch.length[slots] - 1,
        num_tokens=ones * (1 + drafts),
        num_drafts=ones * drafts,
        samples=np.ones(len(slots), np.bool_),
    )
