"""Operations outside steps: the registry of those that are open, with the KV blocks that they hold.

Pure, as the scheduler is: operations leave as effects, and completions say what became of them
(`fd_core.effects.operations`). A block that an operation reads or writes is pinned from the effect to the completion,
so that the block is granted to no other request, whatever happens meanwhile to the request that the operation serves.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fd_core.effects.operations import Effect, LoadDecision
from fd_core.kv.blocks import BlockPool
from fd_core.types import IntArray

_Subject = TypeVar("_Subject")


class Operations:
    """Numbers operations, pins their blocks, and collects what the next call of the scheduler returns."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._last = 0
        self.open: dict[int, tuple[Any, IntArray | None]] = {}
        """What each open operation is about, and the blocks that it holds; an operation is open from its beginning."""
        self.effects: list[Effect] = []
        """What waits to be returned: of operations, and what no completion answers."""
        self.decisions: list[LoadDecision] = []
        """What waits to be told to the trace."""

    def begin(self, about: Any, blocks: IntArray | None = None) -> int:
        """Open an operation, which holds `blocks`, and return its number; the caller adds its effect to `effects`."""
        self._last += 1
        if blocks is not None:
            self._pool.pin(blocks)
            blocks.setflags(write=False)
        self.open[self._last] = about, blocks
        return self._last

    def end(self, number: int, kind: type[_Subject]) -> _Subject:
        """Close an operation, which no longer holds its blocks; return what it is about.

        Raises `RuntimeError` if no operation of that kind and number is open.
        """
        about, blocks = self.open.pop(number, (None, None))
        if not isinstance(about, kind):
            raise RuntimeError(f"operation {number} was completed, but is not open or is of another kind")
        if blocks is not None:
            self._pool.unpin(blocks)
        return about

    def take(self) -> tuple[tuple[Effect, ...], tuple[LoadDecision, ...]]:
        """Return the effects and decisions since the last call, in order."""
        taken = tuple(self.effects), tuple(self.decisions)
        self.effects.clear()
        self.decisions.clear()
        return taken
