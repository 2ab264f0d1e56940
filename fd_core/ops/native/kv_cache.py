"""The paged KV cache in the kernels' own order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import KVCache, KVShape
from fd_core.ops.native.library import checked
from fd_core.ops.native.program import Runtime
from fd_core.types import IntArray


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer of a cache."""

    cache: NativeKVCache
    index: int


class NativeKVCache(KVCache):
    """Keys and values of all layers; see `csrc/kv.h` for the order inside a block."""

    def __init__(self, runtime: Runtime, shape: KVShape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self._library = runtime.library
        own = np.dtype(np.float32 if runtime.wide else np.uint16)
        self._dtype = np.dtype(np.int8) if shape.quantized else own
        needed = shape.bytes_per_block(own.itemsize) * num_blocks
        self.handle = checked(
            self._library.fd_kv_new(
                shape.num_layers,
                num_blocks,
                shape.block_size,
                shape.num_kv_heads,
                shape.head_dim,
                runtime.type_code,
                shape.quantized,
            ),
            f"a KV cache of {num_blocks} blocks, which takes {needed} bytes",
        )

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.fd_kv_free(self.handle)

    def layer(self, index: int) -> NativeLayer:
        """Return the layer's handle."""
        if not 0 <= index < self.shape.num_layers:
            raise IndexError(f"layer {index} is not in 0 to {self.shape.num_layers - 1}")
        return NativeLayer(self, index)

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks in canonical order; bfloat16 as uint16 bits."""
        data = np.empty(self._canonical_shape(len(blocks)), self._dtype)
        self._transfer(blocks, data, to_cache=False)
        return data

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Write exported blocks."""
        if data.dtype != self._dtype or data.shape != self._canonical_shape(len(blocks)):
            raise ValueError(f"exported blocks are {data.dtype} {data.shape}, the cache holds {self._dtype}")
        self._transfer(blocks, np.ascontiguousarray(data), to_cache=True)

    def _canonical_shape(self, count: int) -> tuple[int, ...]:
        shape = self.shape
        return (count, shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.stored_head)

    def _transfer(self, blocks: IntArray, data: npt.NDArray[Any], *, to_cache: bool) -> None:
        ids = np.ascontiguousarray(blocks, np.int32)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.num_blocks):
            raise ValueError(f"blocks {ids.min()} to {ids.max()} are not all in 0 to {self.num_blocks - 1}")
        self._library.fd_kv_transfer(self.handle, ids.ctypes.data, len(ids), data.ctypes.data, to_cache)
