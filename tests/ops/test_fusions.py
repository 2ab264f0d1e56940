"""Fusions, compared with the oracle's composition of primitives, for geometries of real models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest

from fd_core.ops.contract import Ops, PlainActivation
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import WEIGHT_FORMATS
from fd_core.testing.kit.requirements import thorough_but
from fd_core.testing.models.arrays import PACKED_TOLERANCE, assert_near
from fd_core.testing.models.layers import Geometry, LayerOn
from tests.ops.packs import require_format

PLAIN = get_args(PlainActivation)
GEOMETRIES = {
    "plain": (Geometry(), ()),
    "smollm2": (Geometry(heads=9, kv_heads=3, d=64, hidden=96, block_size=32), ()),
    "wide heads": (Geometry(heads=2, kv_heads=1, d=256, block_size=16), ()),
    "odd sizes": (Geometry(heads=3, kv_heads=3, d=10, hidden=38, inner=50, block_size=5), ()),
    "d80": (Geometry(heads=4, kv_heads=4, d=80, rotary=32, block_size=16), ()),
    "d96 many queries": (Geometry(heads=24, kv_heads=1, d=96, block_size=64), ()),
    "more queries than a tile": (Geometry(heads=64, kv_heads=1, d=8, block_size=128), ()),
    "neighbours": (Geometry(interleaved=True), ("interleaved_rope",)),
    "biases": (Geometry(biases=True, d=128), ("biases",)),
    "head norms": (Geometry(head_norms=True), ()),
    "norms of heads after rope": (Geometry(norms_rotated=True), ()),
    "joint norms": (Geometry(heads=9, kv_heads=3, d=24, joint_norms=True, pre_norm=False), ("joint_norms",)),
    "no norms before": (Geometry(pre_norm=False, post_norm=True, adapter_ranks=(5, 8)), ()),
    "no norms before, packed": (Geometry(d=32, hidden=128, inner=256, pre_norm=False, packed="int8"), ()),
    **{f"ungated {kind}": (Geometry(ungated=kind, biases=True), ("ungated", "biases")) for kind in PLAIN},
    "ungated, adapters": (Geometry(ungated="relu2", pre_norm=False, adapter_ranks=(5, 8)), ("ungated",)),
    "norms after": (Geometry(post_norm=True, activation="gelu_tanh"), ()),
    "window": (Geometry(window=21), ("window",)),
    "window over chunks": (Geometry(window=130, block_size=32, activation="gelu"), ("window",)),
    "softcap": (Geometry(softcap=5.0), ("softcap",)),
    "adapters": (Geometry(adapter_ranks=(5, 8)), ()),
    "adapters on odd sizes": (Geometry(heads=3, kv_heads=3, d=10, hidden=38, inner=50, adapter_ranks=(5, 8)), ()),
    "adapters, norms after": (Geometry(post_norm=True, d=64, block_size=32, inner=150, adapter_ranks=(5, 8)), ()),
    "experts": (Geometry(experts=5), ("moe",)),
    "experts without a gate": (Geometry(experts=5, shared_expert=True, ungated_experts="relu2"), ("ungated_experts",)),
    "shared experts": (Geometry(experts=7, shared_expert=True, correction_bias=True, inner=24), ("moe",)),
    **{f"packed {kind}": (Geometry(d=32, hidden=128, inner=256, packed=kind), ()) for kind in sorted(WEIGHT_FORMATS)},
}
QUICK = (
    "plain",
    "neighbours",
    "biases",
    "head norms",
    "joint norms",
    "no norms before",
    "ungated relu2",
    "norms after",
    "window",
    "softcap",
    "adapters",
    "shared experts",
    "packed Q4_1",
)
NAMES = ("attention_inputs", "attention", "project_residual", "mlp_inputs or moe_residual", "project_residual")


@cache
def composed(name: str) -> list[npt.NDArray[np.float32]]:
    return LayerOn(NumpyOps(), GEOMETRIES[name][0]).run(Ops)


@pytest.mark.parametrize("name", thorough_but(GEOMETRIES, *QUICK))
@pytest.mark.in_turn(2)
def test_fusions_equal_the_composition(ops: Ops, require: Callable[..., None], name: str) -> None:
    geometry, abilities = GEOMETRIES[name]
    require(*abilities)
    tolerance = None
    if geometry.packed is not None:
        require_format(ops, geometry.packed)
        tolerance = PACKED_TOLERANCE[geometry.packed]
    for fusion, found, expected in zip(NAMES, LayerOn(ops, geometry).run(ops), composed(name), strict=False):
        try:
            assert_near(ops, ops.from_host(found), expected, tolerance=tolerance)
        except AssertionError as error:
            raise AssertionError(f"{fusion}: {error}") from error
