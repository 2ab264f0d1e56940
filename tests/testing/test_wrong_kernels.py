"""The kit's own cases with the values of a fault detect it in each wrong pack; the right packs pass them."""

from __future__ import annotations

from functools import cache

import pytest

from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.axes import pools, products, routing, sampling
from fd_core.testing.axes.latent import LATENT
from fd_core.testing.axes.layers import LAYERS
from fd_core.testing.axes.parts import KitCase, cases_of
from fd_core.testing.axes.recurrent import RECURRENT
from tests.testing.wrong.kernels import FAULTS

_OF_SIZES = products.ELEMENTS, pools.POOL, pools.TABLE, routing.MANY_EXPERTS
PARTS = {
    part.name: part
    for part in (LAYERS, LATENT, RECURRENT, *products.PARTS, *routing.PARTS, *pools.PARTS, *sampling.PARTS, *_OF_SIZES)
}
TRIES = 12
"""Cases with the values of a fault that are tried; in some, another value hides it."""


def cases_with(part: str, values: dict[str, object]) -> list[KitCase]:
    """Return the first cases of a part that have some values."""
    found = [case for case in cases_of(PARTS[part])[0] if values.items() <= dict(case.values).items()]
    return found[:TRIES]


def failure(case: KitCase, pack: NumpyOps) -> str | None:
    return case._failure(pack, case.values)


@cache
def failure_of_numpy(part: str, text: str) -> str | None:
    """Check the right pack once, although several faults show in a case."""
    return failure(PARTS[part].case(text), NumpyOps())


LARGE = pytest.mark.soak, pytest.mark.timeout(900)
NAMES = [pytest.param(name, marks=LARGE if each.values.get("gib") else ()) for name, each in FAULTS.items()]


@pytest.mark.slow
@pytest.mark.in_turn(3, by=lambda name: FAULTS[name].part)
@pytest.mark.parametrize("name", NAMES)
def test_cases_detect_the_fault(name):
    fault = FAULTS[name]
    cases = cases_with(fault.part, fault.values)
    assert cases, f"no case of {fault.part} has {fault.values}"
    detecting = next((case for case in cases if failure(case, fault.pack())), None)
    assert detecting is not None, f"{[case.text for case in cases]} pass"
    assert failure_of_numpy(fault.part, detecting.text) is None
