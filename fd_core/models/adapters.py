"""Adapters on a device: what each adds to the linears of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fd_core.models.spec import DecoderSpec, LinearSpec
from fd_core.ops.contract import Ops
from fd_core.weights import Adapter

__all__ = ["AdapterWeights", "LayerLoras", "adapters_bytes", "layer_loras", "prepare_adapter"]

AdapterWeights = tuple[tuple[Any | None, ...], ...]
"""For each layer what `Ops.prepare_lora` made for each of its adaptable linears; None where one is left alone."""
_GATE_UP = 2
"""Place of gate and up among the adaptable linears of a layer."""
_RANK_ALIGN = 16
"""Ranks that a pack may round up to."""


@dataclass(frozen=True, slots=True)
class LayerLoras:
    """What adapters add to the linears of one layer, place by place; None where none of them does."""

    qkv: Sequence[Any | None] | None = None
    output: Sequence[Any | None] | None = None
    gate_up: Sequence[Any | None] | None = None
    down: Sequence[Any | None] | None = None


def prepare_adapter(spec: DecoderSpec, adapter: Adapter, ops: Ops) -> AdapterWeights:
    """Prepare an adapter that was read for `spec`."""

    def prepared(linear: LinearSpec, *, gated: bool) -> Any | None:
        parts = [adapter.deltas.get(name) for name in linear.names]
        return ops.prepare_lora(parts, linear.outs, gated=gated) if any(part is not None for part in parts) else None

    with ops.replaceable_weights():
        return tuple(
            tuple(prepared(linear, gated=index == _GATE_UP) for index, linear in enumerate(layer.adaptable))
            for layer in spec.layers
        )


def layer_loras(places: Sequence[AdapterWeights | None]) -> tuple[LayerLoras, ...]:
    """Return what the adapters in the places 1 and up add to each layer; at least one place is taken."""
    layers = next(len(weights) for weights in places if weights is not None)
    loras = []
    for layer in range(layers):
        of_places = [() if weights is None else weights[layer] for weights in places]
        count = max(map(len, of_places))
        columns = [[deltas[linear] if deltas else None for deltas in of_places] for linear in range(count)]
        loras.append(LayerLoras(*(column if any(each is not None for each in column) else None for column in columns)))
    return tuple(loras)


def adapters_bytes(spec: DecoderSpec, count: int, rank: int, item_bytes: int) -> int:
    """Return the bytes that `count` adapters of a rank take on a device."""
    linears = [linear for layer in spec.layers for linear in layer.adaptable]
    elements = sum(len(linear.names) * (linear.ins + sum(linear.outs)) for linear in linears)
    return count * -(-rank // _RANK_ALIGN) * _RANK_ALIGN * elements * item_bytes
