"""All mutants, in the order in which they run."""

from __future__ import annotations

from tests.mutants import blocks, budget, golden_stream, restarts, signalling
from tests.mutants.mutant import NotApplicable

__all__ = ["MUTANTS", "NOT_APPLICABLE"]

MUTANTS = (*signalling.MUTANTS, *budget.MUTANTS, *blocks.MUTANTS, *golden_stream.MUTANTS, *restarts.MUTANTS)
NOT_APPLICABLE = (
    NotApplicable(
        "store-under-the-lock",
        "5.1: storage is an effect, performed outside planning",
        "there is no KV store to call yet",
    ),
)
