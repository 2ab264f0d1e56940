"""Matrix: the row of each slot, protocol 1."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fd_core.config.envelope import OperatingEnvelope
from fd_core.testing.axes.parts import KitCase, cases_of
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.postprocessors.matrices import Matrices, PostprocessTarget, SampledRows, random_rows
from fd_core.testing.postprocessors.steps import MATRICES

EOS = 2


def combinations(slots: int, k: int) -> list[SampledRows]:
    """Return steps for every combination of slots that are idle, revoked, accept no, some or all drafts, or are
    finished by an accepted end of text."""
    kinds = ["idle", "revoked", *((count, count) for count in sorted({0, k // 2, k})), (k, "finished")]
    steps = []
    for number, chosen in enumerate(product(kinds, repeat=slots)):
        order = range(slots) if number % 2 else range(slots - 1, -1, -1)
        rows = [slot for slot in order if isinstance(chosen[slot], tuple)]
        tokens = 10 + np.arange(slots * (1 + k)).reshape(slots, 1 + k)
        tokens[[slot for slot in rows if chosen[slot][1] == "finished"]] = EOS
        steps.append(
            SampledRows(
                tokens[rows].astype(np.int32),
                np.array([chosen[slot][0] for slot in rows], np.int32),
                np.array(rows, np.int32),
                revoked=np.array([slot for slot in order if chosen[slot] == "revoked"], np.int32),
            )
        )
    return steps


@pytest.mark.law("1.1", "1.2", "1.3")
@pytest.mark.parametrize("k", range(9))
def test_every_combination_of_rows(target: PostprocessTarget, k: int) -> None:
    Matrices(target, 3, k).check(*combinations(3, k))


@pytest.mark.law("1.1", "1.2", "1.3")
@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("slots", [1, 2, 33, 65])
def test_every_slot(target: PostprocessTarget, slots: int, k: int) -> None:
    """Give each slot in turn the only row, the only idle state, and the only revocation."""
    matrices, rng = Matrices(target, slots, k), np.random.default_rng(k)
    for slot in range(slots):
        one, others = np.array([slot], np.int32), np.delete(np.arange(slots, dtype=np.int32), slot)
        for rows, revoked in ((one, others), (one, others[:0]), (others, one), (others, one[:0])):
            drawn = random_rows(rng, slots, k, rows=len(rows), revoked=0)
            matrices.check(SampledRows(drawn.sampled, drawn.accepted, rows, revoked=revoked))


@pytest.mark.law("1", "1.1", "1.2", "1.3", "1.9", "8")
@pytest.mark.fd_cases(MATRICES)
def test_matrix(target: PostprocessTarget, case: KitCase) -> None:
    envelope = getattr(target.make, "envelope", OperatingEnvelope())
    if beyond := envelope.exceeded(MATRICES.sizes(case.values)):
        lacks(f"its envelope has {beyond}")
    case.check(target, f"fdcore conformance --postprocess {target.name}")


@pytest.mark.law("1", "1.1", "1.2", "1.3", "1.9", "8")
def test_matrix_on_each_framework_that_it_serves(target: PostprocessTarget) -> None:
    """Check the quick cases on the frameworks other than the first one."""
    cases, quick = cases_of(MATRICES)
    missing = [other for other in target.others if isinstance(other, str)]
    for other in target.others:
        if isinstance(other, PostprocessTarget):
            for case in cases[:quick]:
                command = f"fdcore conformance --postprocess {other.name}:backend={other.ops.framework}"
                case.check(other, command)
    if missing:
        lacks(f"it also serves {'; '.join(missing)}")
