"""All mutants, in the order in which they run."""

from __future__ import annotations

from tests.mutants import (
    admissions,
    blocks,
    budget,
    disagg,
    golden_stream,
    parsing,
    restarts,
    router,
    salts,
    signalling,
    storage,
    token_zero,
    transfers,
)
from tests.mutants.mutant import Mutant, NotApplicable

__all__ = ["MUTANTS", "NOT_APPLICABLE"]

MUTANTS: tuple[Mutant, ...] = (
    *signalling.MUTANTS,
    *token_zero.MUTANTS,
    *budget.MUTANTS,
    *admissions.MUTANTS,
    *blocks.MUTANTS,
    *golden_stream.MUTANTS,
    *restarts.MUTANTS,
    *storage.MUTANTS,
    *salts.MUTANTS,
    *router.MUTANTS,
    *disagg.MUTANTS,
    *transfers.MUTANTS,
    *parsing.MUTANTS,
)
NOT_APPLICABLE: tuple[NotApplicable, ...] = ()
