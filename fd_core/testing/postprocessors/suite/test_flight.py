"""Flight: steps computed before an earlier one is read, without shared state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fd_core.testing.kit.law import require
from fd_core.testing.postprocessors.matrices import Matrices, PostprocessTarget, SampledRows, random_rows

KS = [0, 1, 3, 8]


def in_order(slots: int, k: int) -> SampledRows:
    """Return a step in which every slot has a row, in order, and accepts all of its drafts."""
    tokens = 10 + np.arange(slots * (1 + k), dtype=np.int32).reshape(slots, 1 + k)
    order = np.arange(slots, dtype=np.int32)
    return SampledRows(tokens, np.full(slots, k, np.int32), order, revoked=order[:0])


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
