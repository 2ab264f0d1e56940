"""Terms of a step's cost from measured steps: a sum of nonnegative terms, by least squares.

Vidur trains a forest for each operation from tokens, rows and context; InferSim and rooflines calculate. This is in
between: the inputs that they found relevant, as few terms of one sum, so that some seconds of steps are enough and each
term can be read, changed and reasoned about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fd_core.config import Limits
from fd_core.simulation.costs.profile import CostCurve, FitError, StepTerms
from fd_core.types import Admission, BlockGrant, IntArray, SamplingParams, StepPlan

StepKind = Literal["decode", "prefill", "mixed", "drafts"]
Matrix = npt.NDArray[np.float64]

_REWEIGHTED: Final = 8
"""Rounds in which outliers lose weight, as Huber proposed: other work disturbed them."""
_KNOTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens between which the time of the products is linear."""


class MeasuredStep(NamedTuple):
    """One step: its features and its time."""

    kind: StepKind
    features: tuple[int, int, int, int, float, int]
    """`step_features` of its plan."""
    seconds: float


def fit_steps(steps: Sequence[MeasuredStep]) -> StepTerms:
    """Return the best-fitting terms, with equal weights for steps of any length. Raises `ValueError` for none."""
    if not steps:
        raise ValueError("no steps were measured")
    seconds = np.array([step.seconds for step in steps])
    features = np.array([step.features for step in steps], np.float64)
    tokens, knots = features[:, 0], [1]
    for low, high in pairwise(_KNOTS):  # a segment without a step would be a guess
        if ((tokens > knots[-1]) & (tokens <= high)).any() and (tokens > low).any():
            knots.append(high)
    knots = knots if len(knots) > 1 else [1, 2]
    columns = _columns(features, knots)
    shares, weights = columns / seconds[:, None], np.ones(len(steps))
    for _ in range(_REWEIGHTED):
        x = nonnegative_least_squares(shares * weights[:, None], weights)
        off = np.abs(shares @ x - 1)
        near = max(1.5 * float(np.median(off)), 1e-6)  # steps may fit exactly
        weights = np.sqrt(near / np.maximum(off, near))
    slopes, rest = x[1 : len(knots)], x[len(knots) :]
    rises = np.cumsum([0.0, *(slope * (b - a) for slope, (a, b) in zip(slopes, pairwise(knots), strict=True))])
    first, further, row, read, pair, draft = rest.tolist()
    return StepTerms(
        constant=float(x[0]),
        by_tokens=CostCurve(counts=tuple(map(float, knots)), seconds=tuple(rises.tolist())),
        by_sampled_rows=CostCurve(counts=(0.0, 1.0, 2.0), seconds=(0.0, first, first + further)),
        per_row=row,
        per_context_token=read,
        per_query_key=pair,
        per_draft=draft,
    )


def predict(terms: StepTerms, features: npt.ArrayLike) -> Matrix:
    """Return the seconds float64[n] of steps by their features [n, 6]."""
    table = np.atleast_2d(np.asarray(features, np.float64))
    counts = np.array(terms.by_tokens.counts)
    columns = _columns(table, counts)
    slopes = np.diff(terms.by_tokens.seconds) / np.diff(counts)
    sampled = terms.by_sampled_rows.seconds
    x = [terms.constant + terms.by_tokens.seconds[0], *slopes, sampled[1], sampled[2] - sampled[1]]
    x += [terms.per_row, terms.per_context_token, terms.per_query_key, terms.per_draft]
    return np.asarray(columns @ np.array(x))


def errors_of(terms: StepTerms, steps: Sequence[MeasuredStep]) -> tuple[FitError, ...]:
    """Return the relative errors of the terms on steps, by kind."""
    found = []
    for kind in ("decode", "prefill", "mixed", "drafts"):
        some = [step for step in steps if step.kind == kind]
        if some:
            taken = np.array([step.seconds for step in some])
            shares = np.abs(predict(terms, [step.features for step in some]) / taken - 1)
            found.append(
                FitError(kind=kind, steps=len(some), mean=float(shares.mean()), p99=float(np.percentile(shares, 99)))
            )
    return tuple(found)


def nonnegative_least_squares(a: Matrix, b: Matrix) -> Matrix:
    """Return x >= 0 for which |a x - b| is least, by the active set method of Lawson and Hanson."""
    size = np.linalg.norm(a, axis=0)
    scaled = a / np.where(size > 0, size, 1.0)
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], np.bool_)
    for _ in range(10 * a.shape[1]):
        gradient = np.where(free | (size == 0), -np.inf, scaled.T @ (b - scaled @ x))
        if gradient.max() <= 1e-10 * np.linalg.norm(b):
            break
        free[gradient.argmax()] = True
        while free.any():
            best = np.zeros_like(x)
            best[free] = np.linalg.lstsq(scaled[:, free], b, rcond=None)[0]
            falling = free & (best <= 0)
            if not falling.any():
                x = best
                break
            x = x + np.min(x[falling] / (x[falling] - best[falling])) * (best - x)
            free &= x > 1e-12 * max(float(x.max()), 1e-300)
            x[~free] = 0.0
    return np.asarray(x / np.where(size > 0, size, 1.0))


def _columns(features: Matrix, knots: Sequence[float] | Matrix) -> Matrix:
    """Return the design matrix: a constant, slopes between knots, and the other terms."""
    tokens, sampled, rows, read, pairs, drafts = features.T
    ends = [*knots[1:-1], np.inf]
    segments = [np.clip(tokens, a, b) - a for a, b in zip(knots[:-1], ends, strict=True)]
    first = np.minimum(sampled, 1)
    others = (first, sampled - first, rows, read, pairs, drafts)
    return np.stack([np.ones(len(tokens)), *segments, *others], axis=1)


_MAX_KV_TOKENS: Final = 32768
"""Positions of all rows of a case together: more would take longer to touch than to measure."""
_MAX_PAIRS: Final = 1 << 19
"""Pairs of a token and a position before its chunk, for the same reason."""
_DRAWN: Final = 12
"""Steps of each kind that are held out."""
LEAD_IN: Final = 2
"""Steps of decoding that are not timed: the first ones after another case find its data in the caches."""
_STEPS: Final = 4
"""Steps in which a case decodes and is timed, one after the other."""


class CaseRow(NamedTuple):
    """One row: its first position, the tokens it computes, how many of these are drafts, and if it samples."""

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
    """Positions of the prefix that all rows share, in the blocks of the first one."""

    @property
    def repeats(self) -> int:
        """Steps that can follow one another, each a position further on; a chunk is computed once."""
        return _STEPS if all(row.samples and row.tokens == 1 + row.drafts for row in self.rows) else 1

    def blocks(self, limits: Limits) -> int:
        """KV blocks that the case needs."""
        return sum(-(-self._length(row) // limits.block_size) for row in self.rows)

    def fits(self, limits: Limits) -> bool:
        """Return True if an engine with these limits could plan such a step."""
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
            case = replace(_drawn(kind, limits, drafts, draw=draw), held_out=True)
            if found < _DRAWN and case.rows and case.fits(limits):
                cases.append(case)
                found += 1
    cases += shared_pair(limits)
    return [case for case in dict.fromkeys(cases) if case.fits(limits)]


def shared_pair(limits: Limits) -> tuple[StepCase, ...]:
    """Return a step whose rows share the positions that they read, and the same step with rows that share nothing."""
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
        # Several prompts in one step, and the tail of one alongside the head of the next.
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
        """Draw uniformly over orders of magnitude."""
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


def first_plan(case: StepCase, step: int, first_block: int, vocab_size: int, block_size: int) -> StepPlan:
    """Return the plan that admits each row of a case to a slot and computes it, with the KV that is already there.

    Rows have consecutive blocks from `first_block` on, as an engine first grants them. The contents of KV do not change
    the time to read it.
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
    """Return the next step of decoding; `lengths` are the tokens that the runner holds for each slot."""
    return replace(plan, step=plan.step + 1, starts=lengths[plan.slots] - 1, admissions=(), grants=())
