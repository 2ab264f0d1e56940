"""Axes of products that rows choose: experts and adapters; each case compared with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np

from fd_core.ops.contract import Experts, Lora, Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.weights import ITEM_BYTES, WEIGHT_FORMATS, LowRank
from fd_core.runner.inputs.inputs import adapter_rows
from fd_core.testing.axes.covering import Axis, Case, around, int_of
from fd_core.testing.axes.layers import ACTIVATIONS, has_groups
from fd_core.testing.axes.parts import Edge, Part
from fd_core.testing.axes.products import can_be_stored
from fd_core.testing.axes.reuse import operation_part
from fd_core.testing.models.arrays import (
    GROUPED,
    PACKED_TOLERANCE,
    STORED,
    TOLERANCE,
    Floats,
    Values,
    activations,
    assert_near,
    named,
    raw,
    step_input,
)
from fd_core.testing.models.layers import Geometry, LayerOn
from fd_core.types import IntArray

ORACLE: Final = NumpyOps()


# Experts -------------------------------------------------------------------------------------------------------------

_MOE: Final = (
    Axis(
        "tokens",
        (5, 1, 2, 9, 31, 33, 64, 65, 129, 257),
        rare=({"tokens": 1025}, {"tokens": 8193, "top_k": 8, "experts": 33, "hidden": 38, "inner": 24}),
    ),
    Axis(
        "experts",
        (6, 1, 2, 5, 8, 33, 64, 128),
        rare=(
            {"experts": 257, "tokens": 33, "top_k": 9, "hidden": 38, "inner": 24},
            {"experts": 512, "tokens": 33, "top_k": 10, "hidden": 38, "inner": 24},
        ),
    ),
    Axis("top_k", (2, 1, 3, 4, 6, *around(8), 16)),
    Axis("normalize", (True, False)),
    Axis("norm_floor", (1e-12, 0.0, 0.7), ("Experts.norm_floor",)),
    Axis("correction_bias", (False, True)),
    Axis("shared_expert", (False, True)),
    Axis("shared_gate", (False, True), needs="shared_gate"),
    Axis("scoring", ("softmax", "sigmoid"), needs="any_experts"),
    Axis("weighs_inputs", (False, True), needs="any_experts"),
    Axis(
        "expert_groups",
        (1, 2, 3, 8),
        rare=({"expert_groups": 4, "experts": 12, "top_k": 3, "correction_bias": True},),
        needs="any_experts",
    ),
    Axis("weight_scale", (1.0, 2.5), needs="any_experts"),
    Axis("expert_biases", (False, True), needs="biased_experts"),
    Axis("ungated_experts", (None, "relu2", "gelu"), needs="ungated_experts"),
    Axis("clamped", (False, True), needs="biased_experts"),
    Axis("activation", ACTIVATIONS),
    Axis("hidden", (128, 38, 264)),
    Axis("inner", (128, 64, 24, 130)),
    Axis("routing", ("even", "one expert", "last expert")),
    Axis("packed", (None, *sorted(WEIGHT_FORMATS))),
    Axis("source", ("F32", "F16", "BF16")),
    Axis("stored", STORED),
    Axis("packed_down", (None, "Q6_K", "Q4_1", "Q8_0")),
    Axis("group", (None,), rare=tuple({"group": group, "packed": name} for name in GROUPED for group in (32, 128))),
    Axis("fused", (False, True)),
    Axis("offset", (0, 128, -128)),
    Axis("wild", (False, True)),
)
"""`group`: values that share a scale, of formats in which it varies.

`routing` to one expert is the choice of all tokens; `fused` is `moe_residual`, with the norm before. `offset` of all
scores, which changes no weight of a softmax, but overflows without its peak; `wild`: one of the tokens is NaN."""


def check_moe(ops: Ops, case: Case) -> None:
    """Route tokens whose choice no rounding changes to experts of similar weight."""
    tokens, experts = int_of(case, "tokens"), int_of(case, "experts")
    group = None if case["group"] is None else int_of(case, "group")
    g = Geometry(heads=1, kv_heads=1, d=128, packed_group=group, **{name: case[name] for name in _OF_EXPERTS})  # type: ignore[arg-type]
    results: list[Any] = []
    layers = [LayerOn(pack, g, [(1, 1)]) for pack in (ORACLE, ops)]
    router = _router(g, {"one expert": 0, "last expert": experts - 1}.get(str(case["routing"])))
    router[:, 0] += int_of(case, "offset")
    for layer in layers:
        assert layer.experts is not None
        layer.experts = replace(layer.experts, router=layer.ops.prepare_vector(router))
    x = Values(tokens)(10 * tokens + 200, g.hidden)
    x[:, 0] = 1.0
    decided = layers[0].decided(ORACLE.rms_norm(x, layers[0].norm) if case["fused"] else x, 0.05)
    x = x[decided][np.arange(tokens) % decided.sum()]
    well = np.ones(tokens, np.bool_)
    if case["wild"] and tokens > 1:
        x[tokens // 2], well[tokens // 2] = np.nan, False
    for layer in layers:
        pack, device, chosen = layer.ops, activations(layer.ops, x), layer.experts
        assert chosen is not None
        if case["fused"]:
            result = pack.settle(pack.moe_residual(device, layer.norm, chosen, g.expert_activation))
        else:
            result = pack.moe(device, chosen, g.expert_activation)
        results.append(np.array(pack.to_host(result), np.float32)[well])
    kinds = [case[name] for name in ("packed", "packed_down") if case[name]]
    tolerance = max(
        # Two products follow each other, and the largest input of a single token determines how others are rounded.
        4 * max(PACKED_TOLERANCE[str(each)] for each in kinds) if kinds else TOLERANCE[ops.dtype],
        2e-4 if case["offset"] else 0.0,  # a score of 128 has 16 bits after the point
    )
    assert_near(ops, ops.from_host(results[1]), results[0], tolerance)


_OF_EXPERTS: Final = {*Geometry.__dataclass_fields__} & {axis.name for axis in _MOE}


def _router(g: Geometry, favored: int | None) -> Floats:
    """Return weights with which all chosen experts matter; the first element of a token may favor one expert."""
    router = Values(g.experts)(g.experts, g.hidden, scale=g.hidden**-0.5) * np.float32(1.1)  # no dtype but float32
    router[:, 0] = 0.0
    if favored is not None:
        router[favored, 0] = 4.0
    return router


_MOE_EDGES: Final = {
    "max_num_batched_tokens": Edge("tokens"),
    "experts": Edge("experts"),
    "top_k": Edge("top_k", {"experts": 128}),
    "hidden": Edge("hidden", step=2),
    "inner": Edge("inner", step=2),
}
MOE: Final[Part[Ops]] = operation_part(
    "moe",
    _MOE,
    check_moe,
    lambda case: (
        has_groups(case)
        and can_be_stored(case)
        and not (case["offset"] and case["scoring"] == "sigmoid")
        and not (
            (case["packed"] or case["packed_down"]) and (int_of(case, "hidden") % 128 or int_of(case, "inner") % 128)
        )
        and int_of(case, "experts") * int_of(case, "hidden") * int_of(case, "inner") < 2.2e6
    ),
    _MOE_EDGES,
    needs=("primitives", "moe"),
)


# Experts beyond 2^31 bytes -------------------------------------------------------------------------------------------

_WIDTH: Final = 1024
_ENDS: Final = 5
"""Experts at each end with weights of their own, and as many above a power of 2."""


def expert_bytes(case: Case) -> int:
    """Return the bytes of the experts of a case, without those of a few."""
    return 3 * int_of(case, "gib") << 29


def check_many_experts(ops: Ops, case: Case) -> None:
    """Route a token to each of the first and the last experts, whose gates take more than 2^31 bytes together."""
    count = (int_of(case, "gib") << 30) // (2 * _WIDTH**2 * ITEM_BYTES[ops.dtype]) + 2 * _ENDS
    chosen = np.array([*range(_ENDS), *range(count - _ENDS, count)])
    make, few, others = Values(count), _WIDTH**-0.5, raw(np.zeros((_WIDTH, _WIDTH), np.float32))
    own = {expert: [raw(make(_WIDTH, _WIDTH, scale=few)) for _ in range(3)] for expert in chosen.tolist()}
    parts = [own.get(expert, [others] * 3) for expert in range(count)]
    router = np.eye(count, _WIDTH, dtype=np.float32) * 16
    x = make(len(chosen), _WIDTH, scale=0.25)
    x[np.arange(len(chosen)), chosen] = 8.0
    gate_up, down = ([each[some] for each in parts] for some in (slice(2), slice(2, 3)))
    prepared = (ops.prepare_experts(gate_up, gated=True), ops.prepare_experts(down, gated=False))
    experts = Experts(ops.prepare_vector(router), *prepared, top_k=1, normalize=True)
    found = np.array(ops.to_host(ops.moe(activations(ops, x), experts, "silu")), np.float32)
    for expert, row, y in zip(chosen.tolist(), x, found, strict=True):
        gate, up, last = (each.to_float32() for each in own[expert])
        right = (_silu(gate @ row) * (up @ row)) @ last.T
        with named(f"expert {expert} of {count}"):
            assert_near(ops, ops.from_host(y[None]), right[None])


def _silu(x: Floats) -> Floats:
    activated: Floats = x / (1 + np.exp(-x))
    return activated


MANY_EXPERTS: Final[Part[Ops]] = Part(
    "many_experts", (Axis("gib", (0,), rare=({"gib": 2},)),), check_many_experts, needs=("primitives", "moe")
)


# Adapters ------------------------------------------------------------------------------------------------------------

_LORA: Final = (
    Axis("rows", (5, 1, 2, 16, 17, 33, 65, 129, 257, 1025)),
    Axis("adapters", (2, 1, 3, 4, 5, *around(8), 33), rare=({"adapters": 1024, "rank": 1, "rows": 1025},)),
    Axis("rank", (8, 1, 3, 16, 17, 32, 33, 64, 65, 128), rare=({"rank": 257}, {"rank": 512, "rows": 33})),
    Axis("inputs", (48, 1, 33, 129, 1000, 4104)),
    Axis("outputs", (40, 1, 7, 129, 1000)),
    Axis("parts", (1, 2, 3)),
    Axis("gated", (False, True)),
    Axis("missing", ("none", "a part", "an adapter")),
    Axis("places", ("mixed", "runs", "one", "last", "few")),
    Axis("wild", (False, True)),
    Axis("placed", ("at once", "in turns", "no"), ("Lora.deltas",)),
)
"""`places` of tokens: adapters, alternating or in runs, one for all, the last one, or hardly any; `wild`: the first
adapter's products overflow, which only its own tokens may show. `placed` by `place_loras`, or in turns with
others, which change all parts: at each turn, every second slot changes."""

_Terms: TypeAlias = list[LowRank | None] | None
"""Of one adapter for each part of a linear."""


def _lora_fits(case: Case) -> bool:
    size = int_of(case, "inputs") + int_of(case, "outputs")
    return (not case["gated"] or case["parts"] == 2) and size * int_of(case, "rank") * int_of(case, "adapters") < 2e6


def check_lora(ops: Ops, case: Case) -> None:
    """Add the terms of several adapters to rows that use them or none."""
    rows, count, ins, out, parts = (int_of(case, name) for name in ("rows", "adapters", "inputs", "outputs", "parts"))
    make, places = Values(rows), _places(case)
    y, x = make(rows, parts * out), make(rows, ins)
    adapters: list[_Terms] = [
        [_low_rank(make, max(1, int_of(case, "rank") - index % 3), ins, out) for _ in range(parts)]
        for index in range(count)
    ]
    others: list[_Terms] = [[_low_rank(make, 2, ins, out) for _ in range(parts)] for _ in range(count)]
    if case["missing"] == "an adapter" and count > 1:
        adapters[places[-1] - 1] = None  # of the last token
    for each in adapters[1::2] if case["missing"] == "a part" and parts > 1 else ():
        assert each is not None
        each[0] = None
    if case["wild"]:
        adapters[0] = [LowRank(np.full((2, ins), 3e38, np.float32), make(out, 2)) for _ in range(parts)]
    step = step_input([(rows, rows)], 8, np.zeros((1, -(-rows // 8)), np.int32))
    turns = _turns(adapters, others) if case["placed"] == "in turns" else [adapters]
    results: list[list[Floats]] = []
    for pack in (ops, ORACLE):
        with pack.replaceable_weights():
            prepared = {
                id(each): pack.prepare_lora(each, [out] * parts, gated=bool(case["gated"]))
                for each in (*adapters, *others)
                if each is not None
            }
        before = pack.place_loras([], ins, [out] * parts) if case["placed"] == "in turns" else None
        results.append([])
        for turn in turns:
            deltas: Any = [None if each is None else prepared[id(each)] for each in turn]
            if case["placed"] != "no":
                deltas = before = pack.place_loras(deltas, ins, [out] * parts, before)
            changed = activations(pack, y)
            if deltas is not None:
                lora = Lora(deltas, replace(step, **adapter_rows(places, pack)))
                with np.errstate(all="ignore"):
                    changed = pack.lora(changed, activations(pack, x), lora)
            results[-1].append(np.array(pack.to_host(changed), np.float32))
    well = places != 1 if case["wild"] else np.ones(rows, np.bool_)
    for found, expected in zip(*results, strict=True) if well.any() else ():
        assert_near(ops, ops.from_host(found[well]), expected[well])


def _turns(adapters: list[_Terms], others: Sequence[_Terms]) -> list[list[_Terms]]:
    """Return the adapters of each slot, which begin with others, turn by turn; slots that keep theirs are unchanged."""
    turns = [list(others)]
    for turn, target in enumerate((adapters, adapters, others, others)):
        changed = list(turns[-1])
        changed[turn % 2 :: 2] = target[turn % 2 :: 2]
        turns.append(changed)
    return turns


def _low_rank(make: Values, rank: int, inputs: int, outputs: int) -> LowRank:
    down, up = make(rank, inputs, scale=inputs**-0.5), make(outputs, rank, scale=rank**-0.5)
    return LowRank(down * np.float32(1.1), up * np.float32(1.1))  # no dtype but float32 has all their bits


def _places(case: Case) -> IntArray:
    """Return the adapter slot of each token, 0 for none."""
    rows, count = int_of(case, "rows"), int_of(case, "adapters")
    match case["places"]:
        case "runs":
            places = np.arange(rows) * (count + 1) // rows
        case "one":
            places = np.full(rows, 1)
        case "last":
            places = np.full(rows, count)
        case "few":
            places = np.where(np.arange(rows) % 16 == 3, count, 0)
        case _:
            places = np.arange(rows) % (count + 1)
    places[-1] = count if case["places"] != "one" else places[-1]
    return places.astype(np.int32)


_LORA_EDGES: Final = {
    "max_num_batched_tokens": Edge("rows"),
    "max_loras": Edge("adapters"),
    "max_lora_rank": Edge("rank"),
    "inner": Edge("inputs"),
}
LORA: Final[Part[Ops]] = operation_part("lora", _LORA, check_lora, _lora_fits, _LORA_EDGES, needs=("primitives",))

PARTS: Final = (MOE, LORA)
