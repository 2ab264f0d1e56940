"""Adapters on a device: what each adds to the linears of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fd_core.models.sharding import LinearShare, adaptable_shares
from fd_core.models.spec import DecoderSpec, LinearSpec
from fd_core.ops.contract import Ops
from fd_core.ops.parallel import Parallel
from fd_core.ops.weights import Adapter, LowRank

AdapterWeights = tuple[tuple[Any | None, ...], ...]
"""For each layer what `Ops.prepare_lora` made for each of its adaptable linears; None where one is left alone."""
_GATE_UP = 2
"""Place of gate and up among the adaptable linears of a layer."""
_RANK_ALIGN = 16
"""Ranks that a pack may round up to."""


@dataclass(frozen=True, slots=True)
class LayerLoras:
    """What adapters add to the linears of one layer, see `Ops.place_loras`; None where none of them does."""

    qkv: Any | None = None
    output: Any | None = None
    gate_up: Any | None = None
    down: Any | None = None

    @property
    def in_order(self) -> tuple[Any | None, ...]:
        """The same, in the order of `LayerSpec.adaptable`."""
        return self.qkv, self.output, self.gate_up, self.down


def prepare_adapter(spec: DecoderSpec, adapter: Adapter, ops: Ops) -> AdapterWeights:
    """Prepare an adapter that was read for `spec`: the part of it that belongs to this rank's part of each linear.

    Where products are added up over ranks, each rank first adds what its inputs give to its own product.
    """

    def prepared(linear: LinearSpec, share: LinearShare, *, gated: bool) -> Any | None:
        rows = share.rows or (slice(None),) * len(linear.names)
        parts = [adapter.deltas.get(name) for name in linear.names]
        if all(part is None for part in parts):
            return None
        mine = [None if each is None else _cut(each, of, share.columns) for each, of in zip(parts, rows, strict=True)]
        return ops.prepare_lora(mine, _outs(linear, share), gated=gated)

    with ops.replaceable_weights():
        return tuple(
            tuple(
                prepared(linear, share, gated=index == _GATE_UP)
                for index, (linear, share) in enumerate(
                    zip(layer.adaptable, adaptable_shares(layer, ops.parallel), strict=True)
                )
            )
            for layer in spec.layers
        )


def _cut(delta: LowRank, rows: slice, columns: slice | None) -> LowRank:
    return LowRank(delta.down if columns is None else delta.down[:, columns], delta.up[rows])


def _ins(linear: LinearSpec, share: LinearShare) -> int:
    """Return how many inputs of a linear a rank has."""
    return linear.ins if share.columns is None else len(range(linear.ins)[share.columns])


def _outs(linear: LinearSpec, share: LinearShare) -> list[int]:
    """Return how many columns of its parts' products a rank has."""
    if share.rows is None:
        return list(linear.outs)
    return [len(range(out)[rows]) for out, rows in zip(linear.outs, share.rows, strict=True)]


def layer_loras(
    spec: DecoderSpec, places: Sequence[AdapterWeights | None], ops: Ops, before: Sequence[LayerLoras] | None
) -> tuple[LayerLoras, ...]:
    """Return what the adapters in the places 1 and up add to each layer; `before` is what they added until now."""
    loras = []
    for index, layer in enumerate(spec.layers):
        placed: list[Any | None] = []
        for linear, share in zip(layer.adaptable, adaptable_shares(layer, ops.parallel), strict=True):
            deltas = [None if weights is None else weights[index][len(placed)] for weights in places]
            last = None if before is None else before[index].in_order[len(placed)]
            placed.append(ops.place_loras(deltas, _ins(linear, share), _outs(linear, share), last))
        loras.append(LayerLoras(*placed))
    return tuple(loras)


def adapters_bytes(spec: DecoderSpec, count: int, rank: int, item_bytes: int, parallel: Parallel) -> int:
    """Return the bytes that `count` adapters of rank `rank` take where this part of the model is computed."""
    elements = 0
    for layer in spec.layers:
        for linear, share in zip(layer.adaptable, adaptable_shares(layer, parallel), strict=True):
            elements += len(linear.names) * (_ins(linear, share) + sum(_outs(linear, share)))
    return count * -(-rank // _RANK_ALIGN) * _RANK_ALIGN * elements * item_bytes
