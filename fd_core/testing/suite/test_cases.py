"""Cases that cover every pair of values of the axes of layers, sampling and steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fd_core.ops.contract import Ops
from fd_core.testing.axes.covering import Axis, Value
from fd_core.testing.axes.layers import LAYERS
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.axes.steps import EXACT_ONLY, STEPS
from fd_core.testing.kit.target import Target


@pytest.mark.fd_cases(LAYERS)
def test_layer(ops: Ops, target: Target, require: Callable[..., None], case: KitCase) -> None:
    require("primitives", "kv_transfer")

    def supported(axis: Axis, value: Value) -> bool:
        if axis.name in ("packed", "kv_dtype"):
            return value in (ops.weight_formats if axis.name == "packed" else ops.kv_dtypes)
        return axis.needs not in target.limits

    case.with_only(supported).check(ops, f"fdcore conformance {target}")


@pytest.mark.fd_cases(STEPS)
@pytest.mark.law("4")
def test_step(target: Target, case: KitCase) -> None:
    def supported(axis: Axis, value: Value) -> bool:
        if axis.name == "kv_dtype":
            return value in target.ops.kv_dtypes
        return axis.needs not in target.limits and (target.exact or axis.name not in EXACT_ONLY)

    case.with_only(supported).check(target, f"fdcore conformance {target}")
