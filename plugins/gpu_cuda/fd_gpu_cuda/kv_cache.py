"""KV on the device, and its copies to and from the host beside the steps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from fd_core.ops.contract import SCALE_BYTES, Array, KVShape
from fd_core.ops.torch_attention import TorchKVCache
from fd_core.types import IntArray

from fd_gpu_cuda.device import Cuda

__all__ = ["CudaKVCache", "CudaLayer"]

_CHUNK_BYTES = 64 * 2**20
"""Device memory that one copy takes for its rearranged blocks."""


class CudaLayer(NamedTuple):
    """One layer's keys and values, each [slots, nkv, d] without gaps, and their scales if they are int8.

    Scales lie apart, so that heads of 8 bits begin where 16 bytes can be read at once.
    """

    keys: Array
    values: Array
    block_size: int
    key_scales: Array | None = None
    """float32[slots, nkv]"""
    value_scales: Array | None = None
    """float32[slots, nkv]"""

    @property
    def quantized(self) -> bool:
        """Whether keys and values have scales."""
        return self.key_scales is not None


class CudaKVCache(TorchKVCache):
    """The core's cache with one more block, for padding, and with copies on a stream of their own.

    A copy waits for its own stream only, with the interpreter's lock released, so steps go on. It needs no order with
    theirs: who calls has seen the answers of all steps that touch these blocks, and queues none before it is told.
    """

    def __init__(self, shape: KVShape, num_blocks: int, dtype: Any, cuda: Cuda) -> None:
        super().__init__(shape, num_blocks + 1, dtype, cuda.device)
        self.num_blocks = num_blocks
        self.spare_block = num_blocks
        self._cuda = cuda
        self._chunk = max(1, _CHUNK_BYTES // shape.bytes_per_block(dtype.itemsize))
        self._scales: Array | None = None
        if shape.quantized:
            self._data, self._scales = _with_scales_apart(self._data)
        self._cuda_layers = [self._layer(index) for index in range(shape.num_layers)]

    def layer(self, index: int) -> CudaLayer:  # type: ignore[override]  # the kernels read another layout
        """Return the layer's views."""
        return self._cuda_layers[index]

    def _layer(self, index: int) -> CudaLayer:
        keys, values = self._data[index]
        if self._scales is None:
            return CudaLayer(keys, values, self.shape.block_size)
        return CudaLayer(keys, values, self.shape.block_size, *self._scales[index])

    def _gather(self, index: Array) -> Array:
        if self._scales is None:
            return super()._gather(index)
        scales = self._scales.view(torch.int8).unflatten(3, (-1, SCALE_BYTES))
        return torch.cat([self._blocks(each)[:, :, index] for each in (self._data, scales)], dim=-1)

    def _scatter(self, index: Array, values: Array) -> None:
        if self._scales is None:
            super()._scatter(index, values)
            return
        scales = self._scales.view(torch.int8).unflatten(3, (-1, SCALE_BYTES))
        self._blocks(self._data)[:, :, index] = values[..., :-SCALE_BYTES]
        self._blocks(scales)[:, :, index] = values[..., -SCALE_BYTES:]

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks to the host, a few at a time."""
        with self._cuda.copying():
            parts = [super(CudaKVCache, self).export_blocks(part) for part in self._parts(blocks)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Write exported blocks and wait until they are there."""
        begin = 0
        with self._cuda.copying():
            for part in self._parts(blocks):
                super().import_blocks(part, data[begin : begin + len(part)])
                begin += len(part)
            self._cuda.wait()

    def _parts(self, blocks: IntArray) -> list[IntArray]:
        return [blocks[begin : begin + self._chunk] for begin in range(0, max(len(blocks), 1), self._chunk)]


def _with_scales_apart(data: Array) -> tuple[Array, Array]:
    """Divide int8 [layers, 2, slots, nkv, d + 4] into elements [..., d] and scales float32 [...] of each side."""
    layers, sides, *heads, stored = data.shape
    elements = math.prod(heads) * (stored - SCALE_BYTES)
    flat = data.view(layers, sides, -1)
    scales = flat[:, :, elements:].view(torch.float32)
    return flat[:, :, :elements].unflatten(2, (*heads, stored - SCALE_BYTES)), scales.unflatten(2, heads)
