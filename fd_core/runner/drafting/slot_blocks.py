"""KV blocks of a drafter's own cache, held by slots."""

from __future__ import annotations

import numpy as np

from fd_core.types import IntArray


class SlotBlocks:
    """Block tables that grow on demand. The drafter is not told when a slot falls idle, so the slot that was unused for
    the longest time loses its blocks first.

    A draft that cannot be made costs speed only, so no blocks are reserved. None are fenced either, because one drafter
    alone reads and writes the cache, one forward pass after the other.
    """

    def __init__(self, num_slots: int, num_blocks: int, block_size: int, max_tokens: int) -> None:
        """Share `num_blocks` among slots of up to `max_tokens` tokens."""
        self._block_size = block_size
        self.tables = np.zeros((num_slots, -(-max_tokens // block_size)), np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        """Tokens at the front of each slot whose KV is in its blocks."""
        self._held = np.zeros(num_slots, np.int32)
        self._last_use = np.zeros(num_slots, np.int64)
        self._turn = 0
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that no slot holds."""
        return len(self._free)

    def release(self, slot: int) -> None:
        """Free the blocks of a slot; none of its tokens counts as computed then."""
        self._free.extend(self.tables[slot, : self._held[slot]].tolist())
        self._held[slot] = self.computed[slot] = 0

    def begin_turn(self, slots: IntArray) -> None:
        """Mark `slots` int32[n] as used; none of them loses blocks until the next turn."""
        self._turn += 1
        self._last_use[slots] = self._turn

    def reserve(self, slot: int, tokens: int) -> bool:
        """Give a slot of this turn blocks for its first `tokens` tokens; false, and no change, if there are too few."""
        missing = -(-tokens // self._block_size) - int(self._held[slot])
        while missing > len(self._free):
            resting = np.flatnonzero((self._held > 0) & (self._last_use < self._turn))
            if not len(resting):
                return False
            self.release(int(resting[self._last_use[resting].argmin()]))
        if missing > 0:
            held = int(self._held[slot])
            self.tables[slot, held : held + missing] = [self._free.pop() for _ in range(missing)]
            self._held[slot] = held + missing
        return True
