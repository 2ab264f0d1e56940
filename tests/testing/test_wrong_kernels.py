"""The kit's own cases with the values of a fault detect it in each wrong pack; the right packs pass them."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from functools import cache
from inspect import signature

import pytest

from fd_core.ops.contract import Experts, Heads, Ops
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


FORGOTTEN = {
    f"{cls.__name__}.{field.name}": (cls, field, part, axis)
    for part in PARTS.values()
    for axis in part.axes
    for cls in (Heads, Experts)
    for field in fields(cls)
    if f"{cls.__name__}.{field.name}" in axis.fields and field.default is not MISSING
}
"""Fields of layers that are not those of the plainest ones, each with an axis that varies it."""


def pack_without(cls: type, name: str, plain: object) -> NumpyOps:
    """Return a pack whose operations take a field of heads or experts for the plainest one."""

    def forgetting(operation: str):
        def call(self, *given, **named):
            given = [replace(each, **{name: plain}) if isinstance(each, cls) else each for each in given]
            return getattr(NumpyOps, operation)(self, *given, **named)

        return call

    taking = [
        operation
        for operation, method in vars(Ops).items()
        if callable(method) and any(each.annotation == cls.__name__ for each in signature(method).parameters.values())
    ]
    return type("Forgets", (NumpyOps,), {each: forgetting(each) for each in taking})()


@pytest.mark.slow
@pytest.mark.in_turn(3, by=lambda name: FORGOTTEN[name][2].name)
@pytest.mark.parametrize("name", FORGOTTEN)
def test_cases_detect_a_pack_that_forgets_a_field(name):
    cls, field, part, axis = FORGOTTEN[name]
    pack = pack_without(cls, field.name, field.default)
    cases = [case for case in cases_of(part)[0] if case.values[axis.name] != axis.values[0]]
    assert any(failure(case, pack) for case in cases)
