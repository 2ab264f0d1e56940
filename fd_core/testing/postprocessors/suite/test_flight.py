"""Flight: steps computed before an earlier one is read, without shared state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fd_core.testing.kit.law import require
from fd_core.testing.postprocessors.matrices import Matrices, PostprocessTarget, SampledRows, random_rows
from fd_core.testing.postprocessors.suite.test_matrix import combinations

KS = [0, 1, 3, 8]


def in_order(slots: int, k: int) -> SampledRows:
    """Return a step in which every slot has a row, in order, and accepts all of its drafts."""
    tokens = 10 + np.arange(slots * (1 + k), dtype=np.int32).reshape(slots, 1 + k)
    order = np.arange(slots, dtype=np.int32)
    return SampledRows(tokens, np.full(slots, k, np.int32), order, revoked=order[:0])


@pytest.mark.law("1")
@pytest.mark.parametrize("k", KS)
def test_later_steps_leave_earlier_matrices_alone(target: PostprocessTarget, k: int) -> None:
    """Run steps of equal sizes, then of varying sizes; read all of them at the end."""
    matrices, rng = Matrices(target, 8, k), np.random.default_rng(k)
    counts = [(5, 2)] * 200 + [(rows, (8 - rows) // 2) for rows in range(9)]
    steps = [random_rows(rng, 8, k, rows=rows, revoked=revoked) for rows, revoked in counts]
    for matrix, rows in [(matrices.begin(rows), rows) for rows in steps]:
        matrices.compare_later(matrix, rows)


@pytest.mark.law("1", "1.2")
@pytest.mark.parametrize("k", KS)
def test_matrix_contains_only_its_step(target: PostprocessTarget, k: int) -> None:
    """Vary idle, revoked and reused slots, so that no two steps are equal."""
    matrices, steps = Matrices(target, 3, k), combinations(3, k)
    for index in np.random.default_rng(k).permutation(len(steps))[:120].tolist():
        matrices.check(steps[index], in_order(3, k), steps[index])


@pytest.mark.law("1")
def test_two_runners_do_not_meet(target: PostprocessTarget) -> None:
    """Interleave postprocessors of different sizes, as with a draft model."""
    rng = np.random.default_rng(1)
    both = [(Matrices(target, slots, k), slots, k) for slots, k in ((4, 3), (9, 3), (4, 0), (4, 3))]
    for _ in range(8):
        steps = [(each, random_rows(rng, slots, k, rows=3, revoked=1)) for each, slots, k in both]
        for each, matrix, rows in [(each, each.begin(rows), rows) for each, rows in steps]:
            each.compare_later(matrix, rows)


@pytest.mark.law("8")
@pytest.mark.parametrize("k", KS)
def test_the_inputs_are_left_as_they_are(target: PostprocessTarget, k: int) -> None:
    matrices, rng = Matrices(target, 6, k), np.random.default_rng(k)
    for rows in (in_order(6, k), random_rows(rng, 6, k, rows=3, revoked=2), random_rows(rng, 6, k, rows=0, revoked=6)):
        given = matrices.upload(rows)
        matrices.compute(given)
        for name, array, before in zip(("sampled", "accepted", "slots", "revoked"), given, rows, strict=True):
            same = np.array_equal(target.ops.to_host(array), before)
            require(same, "8", f"{name} changed from {before.tolist()} to {target.ops.to_host(array).tolist()}")


@pytest.mark.law("1")
@pytest.mark.parametrize("k", KS)
def test_the_matrix_shares_no_memory_with_what_was_sampled(target: PostprocessTarget, k: int) -> None:
    """Reuse the input memory, as a pack that replays graphs does."""
    rows, everyone = in_order(6, k), target.ops.from_host(np.arange(6, dtype=np.int32))
    matrices = Matrices(target, 6, k)
    given = matrices.upload(rows)
    matrix = matrices.compute(given)
    target.ops.write_rows(given[0], everyone, target.ops.from_host(np.full_like(rows.sampled, 7)))
    matrices.compare_later(matrix, rows)


@pytest.mark.law("1")
def test_it_is_made_on_one_thread_and_computes_on_another(target: PostprocessTarget) -> None:
    matrices, rows = Matrices(target, 4, 2), random_rows(np.random.default_rng(3), 4, 2, rows=2, revoked=1)
    matrices.check(rows)
    with ThreadPoolExecutor(1) as runner:
        begun = runner.submit(matrices.begin, rows)
    require(begun.exception() is None, "1", f"it fails on the runner's thread: {begun.exception()!r}")
    matrices.compare(begun.result(), rows)
