"""The format of a KV block on the host, for the host tier, the store and transfers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.kv.stores.envelope import HEADER_BYTES
from fd_core.ops.contract import KV_TYPES, KVShape

_HOST_DTYPES: Final = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}


class BlockFormat:
    """Dtype and shape of a block's array on the host, and the batch size of store calls."""

    def __init__(self, dtype: npt.DTypeLike, shape: tuple[int, ...], batch: int | None = None) -> None:
        """`batch`: blocks in one call of the store; None chooses by their size."""
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self.bytes = int(np.prod(shape)) * self.dtype.itemsize
        self.batch = self.batch_of(self.bytes) if batch is None else batch
        """Blocks in one call of the store: enough to hide its latency, few enough to overlap with copies."""

    @staticmethod
    def batch_of(block_bytes: int) -> int:
        """Return how many blocks of `block_bytes` go into one call of the store."""
        return max(1, min(16, 8 * 2**20 // block_bytes))

    @classmethod
    def of(cls, shape: KVShape, dtype: str) -> BlockFormat:
        """Return the block format, in canonical order, of a pack with `dtype`, see `Ops.dtype`."""
        return cls(KV_TYPES.get(shape.dtype, _HOST_DTYPES[dtype]), shape.block_sizes)

    def view(self, payload: memoryview) -> npt.NDArray[Any]:
        """Return the block in an opened payload, read-only; it shares the payload's memory where that is aligned."""
        array = np.frombuffer(payload, self.dtype).reshape(self.shape)
        if not array.flags.aligned:
            array = array.copy()
        array.flags.writeable = False
        return array

    def array(self, payload: memoryview) -> npt.NDArray[Any]:
        """Return the block in an opened payload, read-only, without a copy where that keeps no other memory alive."""
        array = self.view(payload)
        whole = payload.obj
        alone = isinstance(whole, bytes | bytearray) and len(whole) <= self.bytes + HEADER_BYTES
        if alone or array.flags.owndata:
            return array
        array = array.copy()
        array.flags.writeable = False
        return array
