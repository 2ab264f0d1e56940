"""Groups of layers that share one pool of KV blocks.

A layer with a window needs the KV of the last tokens only, so its blocks are freed while the request runs. Layers are
divided into groups of equal size, and a block holds the KV of some tokens for the layers of any one group. So all
groups use the same pool, and each has its own block tables (the idea of vLLM's hybrid KV cache manager).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, overload

import msgspec

if TYPE_CHECKING:  # the command line reads settings without numpy
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
    chunked: bool = False
    """True if `window` is the size of chunks instead, of which a token attends to its own."""

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.whole + self.sliding

    @overload
    def first_read(self, position: int, block_size: int) -> int: ...
    @overload
    def first_read(self, position: IntArray, block_size: int) -> IntArray: ...
    def first_read(self, position: int | IntArray, block_size: int) -> int | IntArray:
        """Return the table entry of the first block that a token at `position` reads in a sliding group."""
        first = position - (position % self.window if self.chunked else self.window - 1)
        return first * (first > 0) // block_size

    @overload
    def first_kept(self, position: int, block_size: int) -> int: ...
    @overload
    def first_kept(self, position: IntArray, block_size: int) -> IntArray: ...
    def first_kept(self, position: int | IntArray, block_size: int) -> int | IntArray:
        """Return the first table entry that a request with settled KV below `position` keeps in a sliding group.

        The token after its last full block reads from there on, so the prefix up to that block can be saved and shared.
        """
        return self.first_read(position // block_size * block_size, block_size)

    def read_after(self, first: int, tokens: int, block_size: int) -> range:
        """Return the entries of sliding groups from `first` on that the token after `tokens` tokens reads.

        A request whose leading `first` entries are in place needs their KV as well.
        """
        if not self.sliding:
            return range(0)
        upto = -(-tokens // block_size)
        return range(max(first, min(self.first_kept(tokens, block_size), upto)), max(first, upto))

    def order(self, whole: range, sliding: range) -> Iterator[tuple[int, int]]:
        """Yield table entry and group of blocks in the order in which they are stored and sent.

        Those of the entries `whole` in groups that keep every block, and then of `sliding` in the others.
        """
        yield from itertools.product(whole, range(self.whole))
        yield from itertools.product(sliding, range(self.whole, self.count))

    @overload
    def blocks(self, tokens: int, block_size: int) -> int: ...
    @overload
    def blocks(self, tokens: npt.NDArray[np.signedinteger], block_size: int) -> npt.NDArray[np.signedinteger]: ...
    def blocks(
        self, tokens: int | npt.NDArray[np.signedinteger], block_size: int
    ) -> int | npt.NDArray[np.signedinteger]:
        """Return the number of blocks that a request with `tokens` tokens holds between steps."""
        each = -(-tokens // block_size)
        more = each - self._most(block_size)
        return self.count * each - self.sliding * more * (more > 0) if self.sliding else each * self.whole

    def longest(self, blocks: int, block_size: int) -> int:
        """Return the most tokens that a request may have in a pool of `blocks`; 2**31 - 1 if only windows bound it."""
        each, most = blocks // self.count, self._most(block_size)
        if self.sliding and each >= most:
            each = (blocks - self.sliding * most) // self.whole if self.whole else 2**31 // block_size
        return min(each * block_size, 2**31 - 1)

    def _most(self, block_size: int) -> int:
        """Return the most blocks of a sliding group that hold one window or chunk, wherever it begins."""
        return -(-(self.window - 1) // block_size) + 1


ONE_GROUP: Final = LayerGroups()
"""All layers in one group, which keeps every block."""
