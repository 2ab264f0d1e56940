"""KV on the device, and its copies to and from the host beside the steps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from fd_core.ops.contract import SCALE_BYTES, Array, KVShape
from fd_core.ops.torch.attention import TorchKVCache
from fd_core.types import IntArray

from fd_gpu_cuda.device import Cuda
from fd_gpu_cuda.kv_copies import BlockCopies


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
    """The core's cache with one more block, for padding, and with copies on streams of their own.

    A copy waits for its own streams only, with the interpreter's lock released, so steps go on.
    """

    def __init__(self, shape: KVShape, num_blocks: int, dtype: Any, cuda: Cuda) -> None:
        super().__init__(shape, num_blocks + 1, dtype, cuda.device)
        self.num_blocks = num_blocks
        self.spare_block = num_blocks
        self._scales: Array | None = None
        parts = [self._data]
        if shape.quantized:
            self._data, self._scales = _with_scales_apart(self._data)
            parts = [self._data, self._scales.view(torch.int8).unflatten(3, (-1, SCALE_BYTES))]
        self._copies = BlockCopies(parts, shape.block_size, cuda)
        self._cuda_layers = [self._layer(index) for index in range(shape.num_layers)]

    def layer(self, index: int) -> CudaLayer:  # type: ignore[override]  # the kernels read another layout
        """Return the layer's views."""
        return self._cuda_layers[index]

    def _layer(self, index: int) -> CudaLayer:
        keys, values = self._data[index]
        if self._scales is None:
            return CudaLayer(keys, values, self.shape.block_size)
        return CudaLayer(keys, values, self.shape.block_size, *self._scales[index])

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks to the host, a few at a time. Raises `MemoryError`, which ends this copy only."""
        exported = np.empty((len(blocks), *self.block_shape), self.host_dtype)
        self._copies.export(blocks, exported)
        return exported

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Write exported blocks and wait until they are there. Raises `MemoryError`, which ends this copy only."""
        self._copies.bring(blocks, self.checked(blocks, data))


def _with_scales_apart(data: Array) -> tuple[Array, Array]:
    """Divide int8 [layers, 2, slots, nkv, d + 4] into elements [..., d] and scales float32 [...], which lie first."""
    *heads, stored = data.shape
    scales, elements = data.view(-1).tensor_split([math.prod(heads) * SCALE_BYTES])
    return elements.view(*heads, stored - SCALE_BYTES), scales.view(torch.float32).view(heads)
