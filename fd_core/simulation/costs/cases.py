"""Which steps a calibration runs: a grid that the terms are fitted to, and others, drawn, that they are judged by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from fd_core.config import Limits
from fd_core.simulation.costs.fitting import StepKind
from fd_core.types import Admission, BlockGrant, IntArray, SamplingParams, StepPlan

__all__ = ["LEAD_IN", "CaseRow", "StepCase", "cases_of", "first_plan", "next_plan", "shared_pair"]

_MAX_KV_TOKENS: Final = 32768
"""Positions of all rows of a case together: more would take longer to touch than to measure."""
_MAX_PAIRS: Final = 1 << 19
"""Pairs of a token and a position before its chunk, for the same reason."""
_DRAWN: Final = 12
"""Steps of each kind that are held out."""
LEAD_IN: Final = 2
"""Steps of decoding that are not timed: the first ones behind another case find its data in the caches."""
_STEPS: Final = 4
"""Steps in which a case decodes and is timed, one after the other."""


class CaseRow(NamedTuple):
    """One row: its first position, how many tokens it computes, how many of these are drafts, and if it samples."""

    start: int
    tokens: int = 1
    drafts: int = 0
    samples: bool = True


@dataclass(frozen=True, slots=True)
class StepCase:
    """A step that is measured several times."""

    kind: StepKind
    rows: tuple[CaseRow, ...]
    held_out: bool = False
    shared: int = 0
    """Positions at the front that all rows have in common, in the blocks of the first one."""

    @property
    def repeats(self) -> int:
        """Steps that can be taken one after the other, each a position further on; a chunk is computed once."""
        return _STEPS if all(row.samples and row.tokens == 1 + row.drafts for row in self.rows) else 1

    def blocks(self, limits: Limits) -> int:
        """KV blocks that the case needs."""
        return sum(-(-self._length(row) // limits.block_size) for row in self.rows)

    def fits(self, limits: Limits) -> bool:
        """Whether an engine with these limits could plan such a step."""
        return (
            len(self.rows) <= limits.max_num_seqs
            and sum(row.tokens for row in self.rows) <= limits.max_num_batched_tokens
            and all(self._length(row) <= limits.max_model_len for row in self.rows)
            and self.blocks(limits) <= limits.num_kv_blocks
            and sum(self._length(row) for row in self.rows) <= _MAX_KV_TOKENS
        )

    def _length(self, row: CaseRow) -> int:
        return row.start + row.tokens + (self.repeats + LEAD_IN) * (1 + row.drafts)


def cases_of(limits: Limits, draw: np.random.Generator) -> list[StepCase]:
    """Return the steps to measure on an engine with these limits."""
    drafts = limits.max_drafts
    cases = [*_grid(limits, drafts)]
    kinds: tuple[StepKind, ...] = ("decode", "prefill", "mixed", "drafts")
    for kind in kinds[: 4 if drafts else 3]:
        found = 0
        for _ in range(50 * _DRAWN):
            case = replace(_drawn(kind, limits, drafts, draw), held_out=True)
            if found < _DRAWN and case.rows and case.fits(limits):
                cases.append(case)
                found += 1
    cases += shared_pair(limits)
    return [case for case in dict.fromkeys(cases) if case.fits(limits)]


def shared_pair(limits: Limits) -> tuple[StepCase, ...]:
    """Return a step whose rows share what they read, and the same step with rows that share nothing."""
    context = min(256, limits.max_model_len // 2) // limits.block_size * limits.block_size
    alone = StepCase("decode", (CaseRow(context),) * limits.max_num_seqs)
    return (replace(alone, shared=context), alone) if context and limits.max_num_seqs > 1 else ()


def _grid(limits: Limits, drafts: int) -> Iterator[StepCase]:
    contexts = [context for context in (32, 256, 1024, 2048, 6144) if context < limits.max_model_len]
    batches = _powers(limits.max_num_seqs)
    chunks = [chunk for chunk in _powers(limits.max_num_batched_tokens) if chunk >= 8]
    for batch in batches:
        for context in contexts:
            yield StepCase("decode", (CaseRow(context),) * batch)
    for index, chunk in enumerate(reversed(chunks)):
        for start in (0, 512, 2048, 6144) if index % 2 == 0 else (0, 1024):
            if chunk * start > _MAX_PAIRS:
                continue
            yield StepCase("prefill", (CaseRow(start, chunk, samples=start == 0),))
    for chunk in chunks[-2:0:-2]:
        # Several prompts in one step, and the tail of one beside the head of the next.
        if chunk >= 32:
            yield StepCase("prefill", (CaseRow(0, chunk // 4),) * 4)
            yield StepCase("prefill", (CaseRow(256, chunk // 2), CaseRow(0, chunk // 2, samples=False)))
    for batch in batches[1::2]:
        for chunk in (chunk for chunk in chunks[-2::-2] if chunk >= 2 * batch):
            yield StepCase("mixed", (*[CaseRow(256)] * batch, CaseRow(0, chunk - batch, samples=False)))
            yield StepCase("mixed", (*[CaseRow(1024)] * (batch // 2), CaseRow(512, chunk - batch)))
    if drafts:
        for batch in batches:
            for count in {1, drafts}:
                for context in contexts[:3]:
                    yield StepCase("drafts", (CaseRow(context, 1 + count, count),) * batch)


def _drawn(kind: StepKind, limits: Limits, drafts: int, draw: np.random.Generator) -> StepCase:
    def number(low: int, high: int) -> int:
        """Draw so that each order of magnitude is as likely."""
        return int(low * (max(high, low) / low) ** draw.random())

    batch = number(1, limits.max_num_seqs)
    context = number(16, limits.max_model_len - 8)
    lengths = [max(1, int(context * (0.5 + draw.random()))) for _ in range(batch)]
    rows = [] if kind == "prefill" else [CaseRow(length) for length in lengths]
    if kind == "drafts":
        each = draw.integers(0, drafts, batch, endpoint=True).tolist()
        rows = [CaseRow(row.start, 1 + count, count) for row, count in zip(rows, each, strict=True)]
    if kind in ("prefill", "mixed"):
        left = number(8, limits.max_num_batched_tokens - len(rows))
        for _ in range(int(draw.integers(1, 3, endpoint=True))):
            tokens = int(draw.integers(1, max(left, 1), endpoint=True))
            left -= tokens
            if left >= 0 and tokens >= 2:
                start = number(1, limits.max_model_len) * int(draw.integers(0, 1, endpoint=True))
                rows.append(CaseRow(start, tokens, samples=bool(draw.random() < 0.5)))
        if all(row.tokens == 1 for row in rows):
            rows = []
    return StepCase(kind, tuple(rows))


def _powers(limit: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `limit`, which is the last."""
    return [*(1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent < limit), limit]


# Plans ----------------------------------------------------------------------------------------------------


def first_plan(case: StepCase, step: int, first_block: int, vocab_size: int, block_size: int) -> StepPlan:
    """Return the plan that admits each row of a case to a slot and computes it, with keys and values that stand there.

    Rows have their blocks one after the other from `first_block` on, as an engine grants them at first. What KV holds
    does not change how long it takes to read.
    """
    count, taken = len(case.rows), first_block
    admissions, grants = [], []
    for slot, row in enumerate(case.rows):
        known = row.start + row.tokens - row.drafts
        ids = (np.arange(known, dtype=np.int64) * 7919 + slot * 104729 + 31 * step) % (vocab_size - 1) + 1
        admissions.append(
            Admission(
                slot=slot,
                gen=step,
                token_ids=ids.astype(np.int32),
                prompt_len=known,
                params=SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True),
                eos_token_ids=(),
                computed=row.start,
            )
        )
        need = -(-case._length(row) // block_size)
        common = case.shared // block_size if slot else 0
        own = np.arange(taken, taken + need - common, dtype=np.int32)
        grants.append(BlockGrant(slot, 0, np.concatenate([np.arange(first_block, first_block + common), own])))
        taken += need - common
    starts, tokens, drafts, samples = zip(*case.rows, strict=True)
    return StepPlan(
        epoch=0,
        step=step,
        slots=np.arange(count, dtype=np.int32),
        gens=np.full(count, step, np.int32),
        starts=np.array(starts, np.int32),
        num_tokens=np.array(tokens, np.int32),
        num_drafts=np.array(drafts, np.int32),
        samples=np.array(samples, np.bool_),
        admissions=tuple(admissions),
        grants=tuple(grants),
    )


def next_plan(plan: StepPlan, lengths: IntArray) -> StepPlan:
    """Return the step behind a step of decoding: `lengths` are the tokens that the runner knows of each slot."""
    return replace(plan, step=plan.step + 1, starts=lengths[plan.slots] - 1, admissions=(), grants=())
