"""The matrix of more slots than any launch has threads."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.testing.kit.target import Target
from fd_core.testing.postprocessors.matrices import Matrices, PostprocessTarget, random_rows


@pytest.mark.parametrize("slots", [64, 257, 1023])
@pytest.mark.parametrize("k", [0, 1, 7, 16])
def test_the_matrix_of_many_slots(target: Target, slots: int, k: int) -> None:
    """Use slots in random order, including the first and the last; rows with releases, all rows, none; large tokens."""
    rng = np.random.default_rng(slots + k)
    matrices = Matrices(PostprocessTarget(target.name, target.postprocess, target.ops), slots, k)
    for rows, back in ((slots // 2, slots // 3), (slots, 0), (0, slots), (1, 0), (0, 0), (slots - 1, 1)):
        matrices.check(random_rows(rng, slots, k, rows=rows, revoked=back))
