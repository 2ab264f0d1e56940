"""Adapters on a device: what all of them add to each linear, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fd_core.models.spec import DecoderSpec, LinearSpec
from fd_core.ops.contract import Lora, Ops
from fd_core.weights import Adapter, RawTensor

__all__ = ["LayerLoras", "adapters_bytes", "prepare_adapters"]


@dataclass(frozen=True, slots=True)
class LayerLoras:
    """What adapters add to the linears of one layer; None where none of them does."""

    qkv: Lora | None = None
    output: Lora | None = None
    gate_up: Lora | None = None
    down: Lora | None = None


def prepare_adapters(spec: DecoderSpec, places: Sequence[Adapter | None], ops: Ops) -> tuple[LayerLoras, ...]:
    """Prepare adapters that were read for `spec`; entry i of `places` takes place i + 1."""
    with ops.replaceable_weights():
        return tuple(LayerLoras(*(_lora(each, places, ops) for each in layer.adaptable)) for layer in spec.layers)


def adapters_bytes(spec: DecoderSpec, count: int, rank: int, item_bytes: int) -> int:
    """Return the bytes that `count` adapters of a rank take on a device."""
    linears = [linear for layer in spec.layers for linear in layer.adaptable]
    elements = sum(len(linear.names) * (linear.ins + sum(linear.outs)) for linear in linears)
    return (count + 1) * rank * elements * item_bytes


def _lora(linear: LinearSpec, places: Sequence[Adapter | None], ops: Ops) -> Lora | None:
    """Stack what the adapters add to a linear; parts such as q, k and v have ranks of their own, side by side."""
    deltas = [[None if adapter is None else adapter.deltas.get(name) for name in linear.names] for adapter in places]
    most = max((len(delta.down) for of_place in deltas for delta in of_place if delta is not None), default=0)
    if not most:
        return None
    rank, count = most * len(linear.names), len(places) + 1
    down = np.zeros((count, len(linear.names), most, linear.ins), np.float32)
    up = np.zeros((sum(linear.outs), count, len(linear.names), most), np.float32)
    for place, of_place in enumerate(deltas, start=1):
        for part, (delta, end) in enumerate(zip(of_place, np.cumsum(linear.outs), strict=True)):
            if delta is not None:
                own = len(delta.down)
                down[place, part, :own] = delta.down
                up[end - linear.outs[part] : end, place, part, :own] = delta.up
    return Lora(
        ops.prepare_linear([RawTensor("F32", down.reshape(count * rank, linear.ins))]),
        ops.prepare_linear([RawTensor("F32", up.reshape(-1, count * rank))]),
        count,
        rank,
    )
