"""Terms of a step's cost from steps that were measured: a sum in which nothing is negative, by least squares.

Vidur trains a forest for each operation from tokens, rows and context; InferSim and rooflines calculate. This is in
between: what they found to matter, as few terms of one sum, so that some seconds of steps are enough and each term can
be read, changed and reasoned about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from fd_core.simulation.costs.profile import CostCurve, FitError, StepTerms

__all__ = ["MeasuredStep", "StepKind", "errors_of", "fit_steps", "nonnegative_least_squares", "predict"]

StepKind = Literal["decode", "prefill", "mixed", "drafts"]
Matrix = npt.NDArray[np.float64]

_REWEIGHTED: Final = 8
"""Rounds in which steps that are far off lose weight, as Huber proposed: something else ran beside them."""
_KNOTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens between which the time of the products is a straight line."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step, by what its cost depends on, with what it takes."""

    kind: StepKind
    features: tuple[int, int, int, int, float, int]
    """What `step_features` says of its plan."""
    seconds: float


def fit_steps(steps: Sequence[MeasuredStep]) -> StepTerms:
    """Return the terms that are nearest to the steps, each step weighing the same whatever it took.

    Raises `ValueError` for no steps.
    """
    if not steps:
        raise ValueError("no steps were measured")
    seconds = np.array([step.seconds for step in steps])
    features = np.array([step.features for step in steps], np.float64)
    knots = _knots_of(features[:, 0])
    columns = _columns(features, knots)
    shares, weights = columns / seconds[:, None], np.ones(len(steps))
    for _ in range(_REWEIGHTED):
        x = nonnegative_least_squares(shares * weights[:, None], weights)
        off = np.abs(shares @ x - 1)
        weights = np.sqrt(np.minimum(1.0, 1.5 * np.median(off) / np.maximum(off, 1e-9)))
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
    """Return how far the terms are from steps, by kind."""
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


def _knots_of(tokens: Matrix) -> list[int]:
    """Return the knots among which there are steps: a segment without one would be a guess."""
    knots = [1]
    for low, high in pairwise(_KNOTS):
        if ((tokens > knots[-1]) & (tokens <= high)).any() and (tokens > low).any():
            knots.append(high)
    return knots if len(knots) > 1 else [1, 2]


def _columns(features: Matrix, knots: Sequence[float] | Matrix) -> Matrix:
    """Return what the unknowns are multiplied with: a constant, slopes between knots, and the other terms."""
    tokens, sampled, rows, read, pairs, drafts = features.T
    ends = [*knots[1:-1], np.inf]
    segments = [np.clip(tokens, a, b) - a for a, b in zip(knots[:-1], ends, strict=True)]
    first = np.minimum(sampled, 1)
    others = (first, sampled - first, rows, read, pairs, drafts)
    return np.stack([np.ones(len(tokens)), *segments, *others], axis=1)
