"""Cases that cover every pair of values of the axes of layers, single operations and sampling."""

from __future__ import annotations

import zlib
from typing import Any, Final

import pytest

from fd_core.backends.memory import available_memory
from fd_core.ops.contract import Ops
from fd_core.testing.axes import pools, products, routing, sampling, steps
from fd_core.testing.axes.latent import LATENT
from fd_core.testing.axes.layers import LAYERS
from fd_core.testing.axes.parts import KitCase, Part, supported_by
from fd_core.testing.axes.recurrent import RECURRENT
from fd_core.testing.kit.growth import MAX_SHARE
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.kit.target import Target
from fd_core.testing.models import embedded

OPERATIONS: Final[tuple[Part[Ops], ...]] = (
    *(LAYERS, LATENT, RECURRENT),
    *(*products.PARTS, *routing.PARTS, *pools.PARTS, *sampling.PARTS),
)


def require(target: Target, *abilities: str) -> None:
    """Skip the test if the backend lacks an ability."""
    for ability in abilities:
        if ability in target.limits:
            lacks(target.limits[ability])


def check(target: Target, case: KitCase) -> None:
    """Check a backend in a case, or skip the test if the backend lacks what all of them need."""
    activations = case.part.name == sampling.CELLS.name and case.values["array"] == "activations"
    require(target, *case.part.needs, *["primitives"] * activations)
    case.with_only(supported_by(target.ops, target.limits)).check(target.ops, f"fdcore conformance {target}")


@pytest.mark.fd_cases(*OPERATIONS)
def test_operation(target: Target, case: KitCase) -> None:
    """Layers are computed by all implementations of attention in turn."""
    every = [*target.implementations.values()]
    check(every[zlib.crc32(str(case).encode()) % len(every)] if case.part.name == LAYERS.name else target, case)


@pytest.mark.fd_cases(steps.STEPS)
@pytest.mark.law("1.7", "4", "5.2")
def test_step(target: Target, case: KitCase) -> None:
    case.with_only(steps.supported_by(target)).check(target, f"fdcore conformance {target}")


@pytest.mark.fd_cases(embedded.EMBEDDED)
def test_states_of_images(target: Target, case: KitCase) -> None:
    require(target, "checkpoints", *embedded.needs_of(case.values))
    case.check(target, f"fdcore conformance {target}")


@pytest.mark.fd_alone
@pytest.mark.fd_cases(pools.POOL)
def test_pool(target: Target, case: KitCase) -> None:
    require_memory(target, 5 * pools.bytes_of(case.values) // 4)
    check(target, case)


_LARGE: Final[dict[Part[Any], Any]] = {
    routing.MANY_EXPERTS: lambda case: 5 * routing.expert_bytes(case) // 4,
    pools.TABLE: lambda case: 3 * pools.bytes_of(case) // 2,
    products.ELEMENTS: lambda _: products.ELEMENTS_BYTES,
}
"""Parts of sizes beyond 2^24 elements or 2^31 bytes, with the memory of a case."""


@pytest.mark.fd_scale
@pytest.mark.fd_alone
@pytest.mark.fd_cases(*_LARGE)
def test_large_arrays(target: Target, case: KitCase) -> None:
    require(target, *["ungated"] * (case.values.get("operation") == "activate"))
    require_memory(target, _LARGE[case.part](case.values))
    check(target, case)


def require_memory(target: Target, size: int) -> None:
    """Skip the test if the device has fewer bytes free, or the host fewer than a check may take."""
    free = target.backend.free_memory()
    if free <= (host := available_memory()):
        free = min(free, int(MAX_SHARE * host))
    if free < size:
        lacks(f"the case needs {size / 2**30:.1f} GiB of free memory, there are {free / 2**30:.1f}")
