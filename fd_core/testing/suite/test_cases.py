"""Cases that cover every pair of values of the axes of layers, single operations and sampling."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from fd_core.backends.memory import available_memory
from fd_core.testing.axes import latent, pools, products, recurrent, routing, sampling, steps
from fd_core.testing.axes.layers import LAYERS
from fd_core.testing.axes.parts import KitCase, supported_by
from fd_core.testing.kit.growth import MAX_SHARE
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.kit.target import Target
from fd_core.testing.models import embedded

Require = Callable[..., None]


def check(target: Target, case: KitCase) -> None:
    case.with_only(supported_by(target.ops, target.limits)).check(target.ops, f"fdcore conformance {target}")


@pytest.mark.fd_cases(LAYERS)
def test_layer(target: Target, require: Require, case: KitCase) -> None:
    require("primitives", "kv_transfer")
    every = [*target.implementations.values()]
    check(every[zlib.crc32(str(case).encode()) % len(every)], case)


@pytest.mark.fd_cases(latent.LATENT)
def test_latent_attention(target: Target, require: Require, case: KitCase) -> None:
    require("primitives", "kv_transfer", "latents")
    check(target, case)


@pytest.mark.fd_cases(recurrent.RECURRENT)
def test_recurrent_layer(target: Target, require: Require, case: KitCase) -> None:
    require("primitives", "kv_transfer", "recurs")
    check(target, case)


@pytest.mark.fd_cases(steps.STEPS)
@pytest.mark.law("1.7", "4", "5.2")
def test_step(target: Target, case: KitCase) -> None:
    case.with_only(steps.supported_by(target)).check(target, f"fdcore conformance {target}")


@pytest.mark.fd_cases(embedded.EMBEDDED)
def test_states_of_images(target: Target, require: Require, case: KitCase) -> None:
    require("checkpoints", *embedded.needs_of(case.values))
    case.check(target, f"fdcore conformance {target}")


@pytest.mark.fd_cases(products.EMBEDDING)
def test_embedding(target: Target, require: Require, case: KitCase) -> None:
    require("primitives")
    check(target, case)


@pytest.mark.fd_cases(products.NORM)
def test_norm(target: Target, require: Require, case: KitCase) -> None:
    require("primitives")
    check(target, case)


@pytest.mark.fd_cases(products.ACTIVATE)
def test_activation(target: Target, require: Require, case: KitCase) -> None:
    require("primitives", "ungated")
    check(target, case)


@pytest.mark.fd_cases(products.GATE)
def test_gates_of_attention(target: Target, require: Require, case: KitCase) -> None:
    require("primitives", "recurs")
    check(target, case)


@pytest.mark.fd_cases(products.LINEAR)
def test_linear(target: Target, require: Require, case: KitCase) -> None:
    require("primitives")
    check(target, case)


@pytest.mark.fd_cases(products.HEAD)
def test_logits(target: Target, require: Require, case: KitCase) -> None:
    require("primitives")
    check(target, case)


@pytest.mark.fd_cases(products.TRANSFER)
def test_transfers(target: Target, case: KitCase) -> None:
    check(target, case)


@pytest.mark.fd_cases(routing.MOE)
def test_experts(target: Target, require: Require, case: KitCase) -> None:
    require("primitives", "moe")
    check(target, case)


@pytest.mark.fd_cases(routing.LORA)
def test_adapters(target: Target, require: Require, case: KitCase) -> None:
    require("primitives")
    check(target, case)


@pytest.mark.fd_cases(pools.ROPE)
def test_rope(target: Target, require: Require, case: KitCase) -> None:
    require("primitives")
    check(target, case)


@pytest.mark.fd_cases(pools.KV)
def test_kv(target: Target, require: Require, case: KitCase) -> None:
    require("primitives", "kv_transfer")
    check(target, case)


@pytest.mark.fd_alone
@pytest.mark.fd_cases(pools.POOL)
def test_pool(target: Target, require: Require, case: KitCase) -> None:
    require("primitives", "kv_transfer", "paged_kv")
    require_memory(target, 5 * pools.bytes_of(case.values) // 4)
    check(target, case)


@pytest.mark.fd_scale
@pytest.mark.fd_alone
@pytest.mark.fd_cases(routing.MANY_EXPERTS)
def test_many_experts(target: Target, require: Require, case: KitCase) -> None:
    require("primitives", "moe")
    require_memory(target, 5 * routing.expert_bytes(case.values) // 4)
    check(target, case)


@pytest.mark.fd_scale
@pytest.mark.fd_alone
@pytest.mark.fd_cases(pools.TABLE)
def test_table(target: Target, require: Require, case: KitCase) -> None:
    require("primitives")
    require_memory(target, 3 * pools.bytes_of(case.values) // 2)
    check(target, case)


@pytest.mark.fd_scale
@pytest.mark.fd_alone
@pytest.mark.fd_cases(products.ELEMENTS)
def test_elements(target: Target, require: Require, case: KitCase) -> None:
    require("primitives", *["ungated"] * (case.values["operation"] == "activate"))
    require_memory(target, products.ELEMENTS_BYTES)
    check(target, case)


def require_memory(target: Target, size: int) -> None:
    """Skip the test if the device has fewer bytes free, or the host fewer than a check may take."""
    free = target.backend.free_memory()
    if free <= (host := available_memory()):
        free = min(free, int(MAX_SHARE * host))
    if free < size:
        lacks(f"the case needs {size / 2**30:.1f} GiB of free memory, there are {free / 2**30:.1f}")


@pytest.mark.fd_cases(sampling.SAMPLE)
def test_sample(target: Target, case: KitCase) -> None:
    check(target, case)


@pytest.mark.fd_cases(sampling.PENALIZE)
def test_penalize(target: Target, case: KitCase) -> None:
    check(target, case)


@pytest.mark.fd_cases(sampling.MASK)
def test_mask(target: Target, case: KitCase) -> None:
    check(target, case)


@pytest.mark.fd_cases(sampling.SCORES)
def test_scores(target: Target, case: KitCase) -> None:
    check(target, case)


@pytest.mark.fd_cases(sampling.VERIFY)
def test_verify(target: Target, case: KitCase) -> None:
    check(target, case)


@pytest.mark.fd_cases(sampling.CELLS)
def test_cells(target: Target, require: Require, case: KitCase) -> None:
    if case.values["array"] == "activations":
        require("primitives")
    check(target, case)
