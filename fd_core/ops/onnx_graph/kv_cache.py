"""Paged keys and values that ONNX Runtime changes in place and the host reads and writes by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from fd_core.ops.contract import KVCache, KVShape
from fd_core.ops.onnx_graph.graph import Graph, GraphSymbol
from fd_core.types import IntArray

__all__ = ["OnnxKVCache", "OnnxLayer", "TracedCache", "TracedLayer"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OnnxLayer:
    """One layer's memory: keys and values are float32[num_blocks, block_size, nkv, d]."""

    keys: Floats
    values: Floats

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return int(self.keys.shape[1])


@dataclass(slots=True)
class TracedLayer:
    """One layer in a graph: its keys and values as the operators so far have left them."""

    keys: GraphSymbol
    values: GraphSymbol
    block_size: int
    num_kv_heads: int
    head_dim: int
    unwritten: tuple[GraphSymbol, GraphSymbol] | None = None
    """Keys and values that the attention operator will write itself."""

    @property
    def width(self) -> int:
        """Elements of one token's keys."""
        return self.num_kv_heads * self.head_dim


class OnnxKVCache(KVCache):
    """Keys and values of each layer as arrays of their own, which a graph's inputs and outputs are bound to."""

    def __init__(self, shape: KVShape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        sizes = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._layers = [
            OnnxLayer(np.zeros(sizes, np.float32), np.zeros(sizes, np.float32)) for _ in range(shape.num_layers)
        ]

    def layer(self, index: int) -> OnnxLayer:
        """Return the layer's arrays."""
        return self._layers[index]

    def bound(self) -> dict[str, tuple[str, Any]]:
        """Return what a session binds: input name -> (output name, OrtValue over the same memory)."""
        return bound(self._layers)

    def export_blocks(self, blocks: IntArray) -> Floats:
        """Copy blocks in canonical order."""
        shape = self.shape
        exported = np.empty(
            (len(blocks), shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim), np.float32
        )
        for index, layer in enumerate(self._layers):
            exported[:, index, 0] = layer.keys[blocks]
            exported[:, index, 1] = layer.values[blocks]
        return exported

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Write exported blocks."""
        if data.dtype != np.float32:
            raise ValueError(f"exported blocks are {data.dtype}, the cache holds float32")
        for index, layer in enumerate(self._layers):
            layer.keys[blocks] = data[:, index, 0]
            layer.values[blocks] = data[:, index, 1]


def bound(layers: list[OnnxLayer]) -> dict[str, tuple[str, Any]]:
    """Return what a session binds for the layers of a `TracedCache`."""
    wrap = onnxruntime.OrtValue.ortvalue_from_numpy
    return {
        f"{part}_{index}": (f"{part}_{index}_after", wrap(getattr(layer, part)))
        for index, layer in enumerate(layers)
        for part in ("keys", "values")
    }


class TracedCache(KVCache):
    """The cache that a forward sees while it is traced."""

    def __init__(self, graph: Graph, shape: KVShape) -> None:
        self.shape = shape
        sizes = ("blocks", shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._layers = [
            TracedLayer(
                graph.input(f"keys_{index}", np.float32, sizes),
                graph.input(f"values_{index}", np.float32, sizes),
                shape.block_size,
                shape.num_kv_heads,
                shape.head_dim,
            )
            for index in range(shape.num_layers)
        ]

    def layer(self, index: int) -> TracedLayer:
        """Return the layer, whose symbols change as the forward writes."""
        return self._layers[index]

    def outputs(self) -> dict[str, GraphSymbol]:
        """Return the keys and values that the forward has written, under the names that `bound` uses."""
        return {
            f"{part}_{index}_after": getattr(layer, part)
            for index, layer in enumerate(self._layers)
            for part in ("keys", "values")
            if getattr(layer, part).name != f"{part}_{index}"
        }

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """A graph holds no values."""
        raise TypeError("a traced cache holds no values")

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """A graph holds no values."""
        raise TypeError("a traced cache holds no values")
