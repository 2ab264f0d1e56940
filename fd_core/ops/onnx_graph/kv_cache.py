"""Paged keys and values that ONNX Runtime changes in place and the host reads and writes by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from fd_core.ops.contract import KVShape
from fd_core.ops.numpy.ops import NumpyKVCache
from fd_core.ops.onnx_graph.graph import Graph, GraphSymbol

_PARTS = ("keys", "values")


class OnnxKVCache(NumpyKVCache):
    """The numpy pack's cache, which a graph's inputs and outputs are bound to."""

    def bound(self) -> dict[str, tuple[str, Any]]:
        """Return what a session binds: input name -> (output name, OrtValue over the same memory)."""
        return bound([self.layer(index) for index in range(self.shape.num_layers)])


def bound(layers: Sequence[npt.NDArray[np.float32]]) -> dict[str, tuple[str, Any]]:
    """Return what a session binds for the layers of a `TracedCache`."""
    wrap = onnxruntime.OrtValue.ortvalue_from_numpy
    return {
        f"{part}_{index}": (f"{part}_{index}_after", wrap(memory))
        for index, layer in enumerate(layers)
        for part, memory in zip(_PARTS, layer, strict=True)
    }


@dataclass(slots=True)
class TracedLayer:
    """One layer in a graph: its keys and values as the operators so far have left them."""

    keys: GraphSymbol
    values: GraphSymbol
    shape: KVShape


class TracedCache:
    """The cache that a forward sees while it is traced: layers, whose symbols change as the forward writes."""

    def __init__(self, graph: Graph, shape: KVShape) -> None:
        self.shape = shape
        sizes = ("blocks", shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._layers = [
            TracedLayer(
                graph.input(f"keys_{index}", np.float32, sizes),
                graph.input(f"values_{index}", np.float32, sizes),
                shape,
            )
            for index in range(shape.num_layers)
        ]

    def layer(self, index: int) -> TracedLayer:
        """Return a layer."""
        return self._layers[index]

    def outputs(self) -> dict[str, GraphSymbol]:
        """Return the keys and values that the forward has written, under the names that `bound` uses."""
        return {
            f"{part}_{index}_after": getattr(layer, part)
            for index, layer in enumerate(self._layers)
            for part in _PARTS
            if getattr(layer, part).name != f"{part}_{index}"
        }
