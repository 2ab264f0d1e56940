"""Axes of the sums over ranks: forms of weights, adapters and norms; each case compared with numpy on one rank."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fd_core.errors import ConfigError
from fd_core.ops.contract import Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.parallel import RankGroup, Stage
from fd_core.ops.weights import WEIGHT_FORMATS
from fd_core.testing.axes.covering import Axis, Case, int_of
from fd_core.testing.axes.parts import Part
from fd_core.testing.kit.ranks import expert_parallel, on_ranks, shared_memory_ranks
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.kit.target import Target
from fd_core.testing.models.arrays import PACKED_TOLERANCE, TOLERANCE, Floats, Values, activations, assert_near
from fd_core.testing.models.layers import Geometry, LayerOn

AXES: Final = (
    Axis("ranks", (2, 3), rare=({"ranks": 5}, {"ranks": 8}, {"ranks": 17})),
    Axis("tokens", (5, 1, 33)),
    Axis("hidden", (128, 38)),
    Axis("inner", (256, 100)),
    Axis("packed", (None, *sorted(WEIGHT_FORMATS))),
    Axis("biases", (False, True), needs="biases"),
    Axis("post_norm", (False, True)),
    Axis("adapters", (0, 1, 2)),
    Axis("experts", (0, 2, 5), needs="moe"),
    Axis("expert_parallel", (False, True), needs="expert_parallel"),
    Axis("shared_expert", (False, True), needs="moe"),
    Axis("expert_biases", (False, True), needs="biased_experts"),
    Axis("ungated_experts", (None, "relu2"), needs="ungated_experts"),
)


def joined(target: Target, part: RankGroup | Stage) -> Ops:
    """Return a separate pack for a rank or a stage; skip the test if the backend has none, or only in separate
    processes."""
    ops = target.cls(target.config()).make_ops()
    try:
        if any(target.cls.rank_environments(part.count if isinstance(part, Stage) else part.parallel.size)):
            lacks("each rank needs a separate device, and so a separate process")
        if isinstance(part, Stage):
            ops.cut(part)
        else:
            ops.join(part)
    except ConfigError as error:
        lacks(error.message)
    return ops


def allowed(case: Case) -> bool:
    """Return True if a layer can have the values of a case."""
    sizes = int_of(case, "hidden") % 128 or int_of(case, "inner") % 128
    if case["expert_parallel"] and int_of(case, "experts") < int_of(case, "ranks"):
        return False
    return not (case["packed"] and sizes) and not (case["experts"] and case["adapters"])


def check_sums(target: Target, case: Case) -> None:
    """Add what the ranks compute from their shares of the inner width to the residual stream.

    Raises `AssertionError`.
    """
    tokens = int_of(case, "tokens")
    ranks = tuple(range(3, 3 + int_of(case, "adapters")))
    given: Any = {name: case[name] for name in Geometry.__dataclass_fields__ if name in case}
    g = Geometry(heads=1, kv_heads=1, d=128, adapter_ranks=ranks, **given)
    x, stream = Values(tokens)(tokens, g.inner), Values(tokens + 1)(tokens, g.hidden)

    def run(ops: Ops) -> Floats:
        layer, y = LayerOn(ops, g, [(tokens, tokens)]), activations(ops, stream)
        if layer.experts is not None:
            y = ops.moe_residual(y, layer.norm, layer.experts, g.expert_activation)
        else:
            y = ops.project_residual(
                activations(ops, x[:, layer.inner].copy()), layer.down, y, layer.post_norm, layer.loras()[-1]
            )
        return np.array(ops.to_host(ops.settle(y)), np.float32)

    expected, tolerance = run(NumpyOps()), TOLERANCE[target.ops.dtype]
    if case["packed"]:
        tolerance = max(tolerance, (4 if g.experts else 1) * PACKED_TOLERANCE[str(case["packed"])])
    make = expert_parallel(shared_memory_ranks) if case["expert_parallel"] else shared_memory_ranks
    for found in on_ranks(int_of(case, "ranks"), lambda group: run(joined(target, group)), make=make):
        assert_near(target.ops, target.ops.from_host(found), expected, tolerance)


SUMS: Final[Part[Target]] = Part("sums", AXES, check_sums, allowed)
