"""All mutants, in the order of judgement."""

from __future__ import annotations

from tests.mutants import (
    admissions,
    blocks,
    budget,
    deployments,
    disagg,
    golden_stream,
    parsing,
    ranks,
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
    *ranks.MUTANTS,
    *storage.MUTANTS,
    *salts.MUTANTS,
    *router.MUTANTS,
    *disagg.MUTANTS,
    *transfers.MUTANTS,
    *parsing.MUTANTS,
    *deployments.MUTANTS,
)
NOT_APPLICABLE: tuple[NotApplicable, ...] = ()
