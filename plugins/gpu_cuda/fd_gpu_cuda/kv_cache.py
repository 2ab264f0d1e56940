"""KV on the device, and its copies to and from the host beside the steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from fd_core.ops.contract import KVShape
from fd_core.ops.torch_attention import TorchKVCache
from fd_core.types import IntArray

from fd_gpu_cuda.device import Cuda

__all__ = ["CudaKVCache"]

_CHUNK_BYTES = 64 * 2**20
"""Device memory that one copy takes for its rearranged blocks."""


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
