"""Hand-written plans for cost tests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fd_core.types import StepPlan

__all__ = ["Row", "decodes", "plan_of"]


class Row(NamedTuple):
    """One row of a plan."""

    start: int
    tokens: int = 1
    drafts: int = 0
    samples: bool = True


def plan_of(*rows: Row) -> StepPlan:
    """Return a plan of these rows."""
    columns = np.array(rows, np.int32).reshape(-1, 4)
    return StepPlan(
        epoch=1,
        step=1,
        slots=np.arange(len(rows), dtype=np.int32),
        gens=np.ones(len(rows), np.int32),
        starts=columns[:, 0].copy(),
        num_tokens=columns[:, 1].copy(),
        num_drafts=columns[:, 2].copy(),
        samples=columns[:, 3].astype(np.bool_),
    )


def decodes(count: int, context: int) -> StepPlan:
    """Return a step in which `count` requests of the same length decode."""
    return plan_of(*[Row(context)] * count)
