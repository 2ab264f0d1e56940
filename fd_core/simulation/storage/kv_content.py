"""What simulated KV blocks hold: nothing, as long as nobody looks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import KVCache, KVShape
from fd_core.types import IntArray

__all__ = ["BlankKVCache"]


class BlankKVCache(KVCache):
    """Blocks without content, for worlds in which nobody looks at it: one byte each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size)
        self.num_blocks = num_blocks

    def layer(self, index: int) -> Any:
        """There is nothing to compute with."""
        raise NotImplementedError("blank blocks hold no KV")

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Return zeros, uint8[n, 1]."""
        return np.zeros((len(blocks), 1), np.uint8)

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Do nothing."""
