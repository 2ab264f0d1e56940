"""Groups of layers that share one pool of KV blocks.

A layer with a window needs the KV of the last tokens only, so its blocks are freed while the request runs. Layers are
divided into groups of equal size, and a block holds the KV of some tokens for the layers of any one group. So all
groups use the same pool, and each has its own block tables (the idea of vLLM's hybrid KV cache manager).
"""

from __future__ import annotations

from typing import Final, overload

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.types import IntArray

MAX_GROUPS: Final = 16
"""Limit of groups: each has a block table in every step."""


class LayerGroups(msgspec.Struct, frozen=True):
    """Number of groups of layers of each kind; those that attend to the whole context are numbered first."""

    whole: int = 1
    """Groups whose layers attend to the whole context."""
    sliding: int = 0
    """Groups whose layers attend to a window."""
    window: int = 0
    """Tokens that a token attends to in a sliding group, including itself; 0 if there is no such group."""

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.whole + self.sliding

    @property
    def single(self) -> bool:
        """True if there is one group, which keeps every block."""
        return self.whole == 1 and not self.sliding

    @overload
    def first_read(self, position: int, block_size: int) -> int: ...
    @overload
    def first_read(self, position: IntArray, block_size: int) -> IntArray: ...
    def first_read(self, position: int | IntArray, block_size: int) -> int | IntArray:
        """Return the table entry of the first block that a token at `position` reads in a sliding group."""
        if isinstance(position, int):
            return max(position + 1 - self.window, 0) // block_size
        return np.maximum(position + 1 - self.window, 0) // block_size

    def blocks(self, tokens: int, block_size: int) -> int:
        """Return the number of blocks that a request with `tokens` tokens holds between steps."""
        each = -(-tokens // block_size)
        return self.whole * each + self.sliding * min(each, self._most(block_size))

    def blocks_of(self, tokens: npt.NDArray[np.signedinteger], block_size: int) -> npt.NDArray[np.signedinteger]:
        """Return `blocks` of each element of an array."""
        each = -(-tokens // block_size)
        return self.whole * each + self.sliding * np.minimum(each, self._most(block_size)) if self.sliding else each

    def longest(self, blocks: int, block_size: int) -> int:
        """Return the most tokens that a request may have in a pool of `blocks`; 2**31 - 1 if only windows bound it."""
        each, most = blocks // self.count, self._most(block_size)
        if self.sliding and each >= most:
            each = (blocks - self.sliding * most) // self.whole if self.whole else 2**31 // block_size
        return min(each * block_size, 2**31 - 1)

    def _most(self, block_size: int) -> int:
        """Return the most blocks of a sliding group that hold one window, wherever it begins."""
        return -(-(self.window - 1) // block_size) + 1


ONE_GROUP: Final = LayerGroups()
"""All layers in one group, which keeps every block."""
