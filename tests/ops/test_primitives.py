"""Operations: each primitive compared with its specification, in every pack and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from fd_core.ops.contract import Activation, Array, Experts, Heads, Lora, Norm, Ops, PlainActivation, Rope
from fd_core.ops.weights import WEIGHT_FORMATS, LowRank, RawTensor
from fd_core.runner.inputs.inputs import adapter_rows
from fd_core.testing.models.arrays import (
    PACKED_TOLERANCE,
    Floats,
    Values,
    activations,
    assert_near,
    assert_same,
    packed_weight,
    raw,
    step_input,
)
from tests.ops.packs import require_format

Require = Callable[..., None]


@pytest.fixture
def values() -> Values:
    return Values(11)


def no_rope(ops: Ops) -> Rope:
    """Return identity tables, for operations that have a rope only in their geometry."""
    return Rope(ops.prepare_vector(np.ones((16, 4), np.float32)), ops.prepare_vector(np.zeros((16, 4), np.float32)))


def heads_of(ops: Ops, x: Floats) -> tuple[Array, Array, Array]:
    """Return [T, heads, d] values as activations of the pack, as q, k and v."""
    tokens, heads, d = x.shape
    flat = activations(ops, np.concatenate([x, x, x], axis=1).reshape(tokens, -1))
    return ops.split_heads(flat, Heads(heads, heads, d, scale=1.0, rope=no_rope(ops)))


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (RawTensor("F32", np.array([[1.5, -2.0]], np.float32)), [[1.5, -2.0]]),
        (RawTensor("F16", np.array([[1.5, -2.0]], np.float16)), [[1.5, -2.0]]),
        (RawTensor("BF16", np.array([[0x3FC0, 0xC000]], np.uint16)), [[1.5, -2.0]]),
    ],
    ids=["F32", "F16", "BF16"],
)
def test_weights_of_every_type_keep_their_values(ops: Ops, tensor: RawTensor, expected: list[list[float]]) -> None:
    tensor.data.flags.writeable = False  # as from a mapped file
    table = ops.prepare_embedding(tensor)
    row = ops.embedding(table, ops.from_host(np.zeros(1, np.int32)))
    assert_same(ops.to_host(row), expected)
    projected = ops.linear(row, ops.prepare_linear([tensor, tensor]))
    assert ops.to_host(projected).tolist() == [[6.25, 6.25]]
    assert ops.to_host(ops.linear(row, ops.tied_head(table, tensor))).tolist() == [[6.25]]


@pytest.mark.parametrize("kind", sorted(WEIGHT_FORMATS))
def test_packed_weights_equal_what_they_stand_for(ops: Ops, values: Values, kind: str) -> None:
    """Multiply alone, combined with another format, and as gate and up."""
    require_format(ops, kind)
    x = values(5, 256)
    other = packed_weight("Q6_K", 24, 256, scale=0.1)
    tolerance = PACKED_TOLERANCE[kind]
    weight, up = packed_weight(kind, 40, 256, scale=0.1), packed_weight(kind, 40, 256, scale=0.05)
    expected, expected_up = x @ weight.to_float32().T, x @ up.to_float32().T
    bias = raw(np.arange(40))
    found = ops.linear(activations(ops, x), ops.prepare_linear([weight], [bias]))
    assert_near(ops, found, expected + np.arange(40), tolerance=tolerance)
    if other.format in ops.weight_formats:
        found = ops.linear(activations(ops, x), ops.prepare_linear([weight, other]))
        assert_near(ops, found, np.hstack([expected, x @ other.to_float32().T]), tolerance=tolerance)
    gate_up = ops.prepare_linear([weight, up], gated=True)
    gated = ops.gated_linear(activations(ops, x), gate_up, "silu")
    assert_near(ops, gated, expected / (1 + np.exp(-expected)) * expected_up, tolerance=tolerance)
    apart = ops.gate_up(activations(ops, x), gate_up)
    assert_near(ops, apart, np.hstack([expected, expected_up]), tolerance=tolerance)


def test_embedding_looks_up_and_scales_rows(ops: Ops, values: Values) -> None:
    table = values(7, 4)
    ids = ops.from_host(np.array([3, 0], np.int32))
    assert_near(ops, ops.embedding(ops.prepare_embedding(raw(table)), ids), table[[3, 0]])
    assert_near(ops, ops.embedding(ops.prepare_embedding(raw(table)), ids, 2.0), table[[3, 0]] * 2)


def test_rows_of_packed_tables_equal_those_of_the_dequantized_table(ops: Ops) -> None:
    ids = np.array([40, 0, 33, 40, 7], np.int32)
    for kind in sorted(ops.table_formats):
        packed = packed_weight(kind, 41, 256, scale=0.1)
        for scale in (1.0, 48.0**0.5):
            found, expected = (
                ops.to_host(ops.embedding(ops.prepare_embedding(table), ops.from_host(ids), scale))
                for table in (packed, packed.expanded())
            )
            assert_same(found, expected)


def test_tied_head_of_a_packed_table_multiplies_as_a_linear(ops: Ops, values: Values) -> None:
    x, ids, bias = values(3, 256), np.arange(40, dtype=np.int32), raw(np.arange(40))
    for kind in sorted({*ops.table_formats} & {*ops.weight_formats}):
        weight = packed_weight(kind, 40, 256, scale=0.1)
        table = ops.prepare_embedding(weight)
        for given in ((), (bias,)):
            head = ops.tied_head(table, weight, *given)
            linear = ops.prepare_linear([weight], list(given) or None)
            assert_same(*(ops.to_host(ops.linear(activations(ops, x), each)) for each in (head, linear)))
        assert_near(ops, ops.embedding(table, ops.from_host(ids)), weight.to_float32())


def test_rms_norm_of_rows(ops: Ops, values: Values) -> None:
    x, weight = values(3, 8), values(8)
    found = ops.rms_norm(activations(ops, x), Norm(ops.prepare_vector(weight), 0.1))
    assert_near(ops, found, x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 0.1) * weight)


def test_rms_norm_of_heads(ops: Ops, values: Values) -> None:
    x, weight = values(3, 2, 8), values(8)
    found = ops.rms_norm(heads_of(ops, x)[0], Norm(ops.prepare_vector(weight), 0.1))
    assert_near(ops, found, x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 0.1) * weight)


def test_joint_norm_of_all_heads(ops: Ops, values: Values) -> None:
    x, weight = values(3, 2, 8), values(2, 8)
    found = ops.joint_norm(heads_of(ops, x)[0], Norm(ops.prepare_vector(weight), 0.1), 16)
    assert_near(ops, found, x / np.sqrt((x**2).mean(axis=(1, 2), keepdims=True) + 0.1) * weight)


def test_linear_stacks_its_parts(ops: Ops, values: Values) -> None:
    x, a, b = values(3, 5), values(2, 5), values(4, 5)
    found = ops.linear(activations(ops, x), ops.prepare_linear([raw(a), raw(b)]))
    assert_near(ops, found, np.hstack([x @ a.T, x @ b.T]))


def test_linear_adds_its_biases(ops: Ops, values: Values, require: Require) -> None:
    require("biases")
    x, a, b = values(3, 5), values(2, 5), values(4, 5)
    biases = [np.arange(2), np.arange(4) * 10]
    found = ops.linear(activations(ops, x), ops.prepare_linear([raw(a), raw(b)], list(map(raw, biases))))
    assert_near(ops, found, np.hstack([x @ a.T + biases[0], x @ b.T + biases[1]]))


ACTIVATIONS: dict[Activation, Callable[[float], float]] = {
    "silu": lambda z: z / (1 + math.exp(-z)),
    "gelu": lambda z: z * 0.5 * (1 + math.erf(z / math.sqrt(2))),
    "gelu_tanh": lambda z: z * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
}


@pytest.mark.parametrize("kind", [*get_args(PlainActivation), *(f"gate {name}" for name in get_args(Activation))])
def test_activation_of_nan_is_nan(ops: Ops, values: Values, kind: str) -> None:
    """Otherwise a request whose activations are NaN gets a text instead of an error."""
    x = values(3, 74)
    x[0, ::5], x[1] = np.nan, np.nan
    expected = np.isnan(x)
    if kind.startswith("gate "):
        found = ops.gate(activations(ops, x), kind.removeprefix("gate "))  # type: ignore[arg-type]
        expected = expected[:, :37] | expected[:, 37:]
    else:
        found = ops.activate(activations(ops, x), kind)  # type: ignore[arg-type]
    assert_same(np.isnan(np.asarray(ops.to_host(found), np.float32)), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_linear_activates_the_gate(ops: Ops, values: Values, activation: Activation) -> None:
    x, gate, up = values(3, 5), values(4, 5), values(4, 5)
    found = ops.gated_linear(activations(ops, x), ops.prepare_linear([raw(gate), raw(up)], gated=True), activation)
    assert_near(ops, found, np.vectorize(ACTIVATIONS[activation])(x @ gate.T) * (x @ up.T))


def test_gate_and_up_are_consecutive(ops: Ops, values: Values) -> None:
    """Adapters add to a gated weight's output before the activation."""
    x, gate, up = values(3, 5), values(21, 5), values(21, 5)
    both = ops.gate_up(activations(ops, x), ops.prepare_linear([raw(gate), raw(up)], gated=True))
    assert_near(ops, both, np.hstack([x @ gate.T, x @ up.T]))
    assert_near(ops, ops.gate(both, "silu"), np.vectorize(ACTIVATIONS["silu"])(x @ gate.T) * (x @ up.T))


PLACES = np.array([0, 2, 1, 0, 2], np.int32)
"""Adapter slot of each of five tokens, 0 for none."""


def lora_of(ops: Ops, adapters: Sequence[Sequence[LowRank | None] | None], *, gated: bool = False) -> Lora:
    """Prepare adapters of a linear with parts of 7 columns, for tokens with the slots `PLACES`."""
    step = step_input([(5, 5)], 8, np.zeros((1, 1), np.int32))
    with ops.replaceable_weights():
        deltas = [
            None if parts is None else ops.prepare_lora(parts, [7] * len(parts), gated=gated) for parts in adapters
        ]
    return Lora(deltas, replace(step, **adapter_rows(PLACES, ops)))


@pytest.mark.parametrize("gated", [False, True], ids=["stacked", "gated"])
def test_lora_adds_the_delta_of_each_tokens_adapter(ops: Ops, values: Values, gated: bool) -> None:
    """Parts have different ranks, and one adapter does not change a part."""
    y, x = values(5, 14), values(5, 12)
    first = [LowRank(values(rank, 12), values(7, rank)) for rank in (3, 2)]
    second = [None, LowRank(values(5, 12), values(7, 5))]
    found = ops.lora(activations(ops, y), activations(ops, x), lora_of(ops, [first, second], gated=gated))
    expected = y.copy()
    for row, place in enumerate(PLACES):
        for part, each in enumerate(([None, None], first, second)[place]):
            if each is not None:
                expected[row, 7 * part : 7 * part + 7] += each.up @ (each.down @ x[row])
    assert_near(ops, found, expected)


def test_the_numbers_of_an_adapter_reach_no_token_of_another(ops: Ops, values: Values) -> None:
    """An adapter whose products overflow must only affect its own tokens."""
    y, x, well = values(5, 7), values(5, 12), LowRank(values(3, 12), values(7, 3))
    x[2] = 3e38
    wild = LowRank(np.full((3, 12), 3e38, np.float32), values(7, 3))
    found = ops.lora(activations(ops, y), activations(ops, x), lora_of(ops, [[wild], [well]]))
    others = np.flatnonzero(PLACES != 1)
    added = np.where(PLACES[:, None] == 2, x, 0) @ well.down.T @ well.up.T
    assert_near(ops, ops.gather_rows(found, ops.from_host(others.astype(np.int32))), (y + added)[others])


def test_split_heads_takes_queries_then_keys_then_values(ops: Ops, values: Values) -> None:
    x = values(3, (4 + 2 * 2) * 8)
    found = ops.split_heads(activations(ops, x), Heads(4, 2, 8, scale=1.0, rope=no_rope(ops)))
    for part, expected in zip(found, np.split(x, [32, 48], axis=1), strict=True):
        assert_near(ops, part, expected.reshape(3, -1, 8))


@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_rope_turns_pairs_and_leaves_the_rest(
    ops: Ops, values: Values, require: Require, interleaved: bool, rotary: int
) -> None:
    require(*(("interleaved_rope",) if interleaved else ()))
    x = values(3, 2, 8)
    angles = np.random.default_rng(1).uniform(0, 6, size=(5, rotary // 2))
    positions = np.array([4, 0, 2], np.int32)
    cos, sin = (ops.prepare_vector(table.astype(np.float32)) for table in (np.cos(angles), np.sin(angles)))
    found = ops.rope(heads_of(ops, x)[0], Rope(cos, sin, interleaved), ops.from_host(positions))
    half, expected = rotary // 2, x.copy()
    for i, (a, b) in enumerate((2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)):
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angles[positions, i])[:, None]
        expected[..., a], expected[..., b] = turned.real, turned.imag
    assert_near(ops, found, expected)


def test_rope_keeps_the_amplitude_of_its_tables(ops: Ops, values: Values) -> None:
    """YaRN scales cosine and sine, so they cannot be recomputed from the angle."""
    x, amplitude = values(3, 2, 8), 1.25
    angles = np.random.default_rng(1).uniform(0, 6, size=(5, 4))
    tables = (amplitude * np.cos(angles), amplitude * np.sin(angles))
    cos, sin = (ops.prepare_vector(table.astype(np.float32)) for table in tables)
    positions = np.array([4, 0, 2], np.int32)
    found = ops.rope(heads_of(ops, x)[0], Rope(cos, sin), ops.from_host(positions))
    turned = (x[..., :4] + 1j * x[..., 4:]) * (amplitude * np.exp(1j * angles[positions]))[:, None]
    assert_near(ops, found, np.concatenate([turned.real, turned.imag], axis=-1))


def test_add_adds(ops: Ops, values: Values) -> None:
    x, y = values(3, 8), values(3, 8)
    assert_near(ops, ops.add(activations(ops, x), activations(ops, y)), x + y)


def test_gathers_rows_of_any_array(ops: Ops) -> None:
    rows = ops.from_host(np.array([2, 0, 2], np.int32))
    for array in (np.arange(3, dtype=np.int32), np.arange(6, dtype=np.float32).reshape(3, 2)):
        assert_same(ops.to_host(ops.gather_rows(ops.from_host(array), rows)), array[[2, 0, 2]])


def test_logits_are_float32(ops: Ops, values: Values) -> None:
    x, weight = values(2, 6), values(9, 6)
    found = ops.logits_of(activations(ops, x), ops.prepare_linear([raw(weight)]), None)
    assert ops.to_host(found).dtype == np.float32
    assert_near(ops, found, x @ weight.T)


def test_logits_are_softly_capped(ops: Ops, values: Values, require: Require) -> None:
    require("softcap")
    x, weight = values(2, 6), values(9, 6)
    found = ops.logits_of(activations(ops, x), ops.prepare_linear([raw(weight)]), 1.5)
    assert_near(ops, found, 1.5 * np.tanh(x @ weight.T / 1.5))


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("corrected", [False, True], ids=["", "corrected"])
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalized"])
def test_moe_adds_the_weighted_outputs_of_the_chosen_experts(
    ops: Ops, values: Values, require: Require, normalize: bool, corrected: bool, gated: bool
) -> None:
    require("moe")
    x, router = values(9, 6), values(5, 6)
    gates, ups, downs = values(6, 4, 6), values(6, 4, 6), values(6, 6, 4)  # 5 experts, and the shared one
    bias = values(5) if corrected else np.zeros(5, np.float32)
    gate = values(6)
    experts = Experts(
        router=ops.prepare_vector(router),
        gate_up=ops.prepare_experts([[raw(gates[e]), raw(ups[e])] for e in range(5)], gated=True),
        down=ops.prepare_experts([[raw(downs[e])] for e in range(5)], gated=False),
        top_k=2,
        normalize=normalize,
        correction_bias=ops.prepare_vector(bias) if corrected else None,
        norm_floor=0.7,
        shared_gate_up=ops.prepare_linear([raw(gates[5]), raw(ups[5])], gated=True),
        shared_down=ops.prepare_linear([raw(downs[5])]),
        shared_gate=ops.prepare_vector(gate) if gated else None,
    )

    def expert(index: int, token: Floats) -> Floats:
        gate = gates[index] @ token
        result: Floats = downs[index] @ (gate / (1 + np.exp(-gate)) * (ups[index] @ token))
        return result

    expected = []
    for token in x:
        scores = np.exp(router @ token) / np.exp(router @ token).sum()
        chosen = np.argsort(-(scores + bias))[:2]
        weights = scores[chosen] / (max(scores[chosen].sum(), 0.7) if normalize else 1)
        share = 1 / (1 + np.exp(-(gate @ token))) if gated else 1.0
        expected.append(
            share * expert(5, token) + sum(w * expert(e, token) for w, e in zip(weights, chosen, strict=True))
        )
    assert_near(ops, ops.moe(activations(ops, x), experts, "silu"), np.stack(expected))
