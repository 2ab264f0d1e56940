"""Device: the matrix is made where the tokens are, and the host waits for nothing."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from fd_core.testing.kit.law import require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.postprocessors.matrices import Matrices, place_of, random_rows
from fd_core.testing.postprocessors.target import PostprocessTarget
from fd_core.testing.postprocessors.waiting import no_waiting

STEPS = [(3, 2), (6, 0), (0, 6), (0, 0), (1, 5)]
"""Rows and revoked slots of six."""


@pytest.mark.law("1")
@pytest.mark.parametrize("k", [0, 1, 8])
@pytest.mark.parametrize(("rows", "revoked"), STEPS)
def test_the_matrix_is_an_array_of_the_device(target: PostprocessTarget, rows: int, revoked: int, k: int) -> None:
    matrices = Matrices(target, 6, k)
    given = matrices.upload(random_rows(np.random.default_rng(k), 6, k, rows, revoked))
    matrix = matrices.compute(given)
    require(place_of(matrix) == place_of(given[0]), "1", f"it is {place_of(matrix)}; tokens are {place_of(given[0])}")
    require(matrix.dtype == given[0].dtype, "1", f"the matrix holds {matrix.dtype}, not int32")
    require(list(matrix.shape) == [6, 1 + k], "1", f"the matrix is {list(matrix.shape)}, not {[6, 1 + k]}")


@pytest.mark.law("1")
@pytest.mark.parametrize("k", [0, 1, 8])
@pytest.mark.parametrize(("rows", "revoked"), STEPS)
def test_the_host_waits_for_nothing(target: PostprocessTarget, rows: int, revoked: int, k: int) -> None:
    """The first step of a shape may compile, so it is the second one that must not wait."""
    matrices, rng = Matrices(target, 6, k), np.random.default_rng(k)
    matrices.check(random_rows(rng, 6, k, rows, revoked))
    step = random_rows(rng, 6, k, rows, revoked)
    given = matrices.upload(step)
    with no_waiting(target.ops, given[0]):
        matrix = matrices.compute(given)
    matrices.compare(matrix, step)


@pytest.mark.law("1")
def test_nothing_of_a_step_is_kept(target: PostprocessTarget) -> None:
    matrices = Matrices(target, 6, 3)
    given = matrices.upload(random_rows(np.random.default_rng(1), 6, 3, 3, 2))
    matrix = matrices.compute(given)
    try:
        left = [weakref.ref(each) for each in (matrix, *given)]
    except TypeError:
        lacks("arrays of this framework have no weak references")
    del matrix, given
    gc.collect()
    kept = sum(each() is not None for each in left)
    require(not kept, "1", f"{kept} arrays of a step are alive once nobody else has them")
