"""Registry of open operations outside steps, with the KV blocks that they hold.

Pure, as the scheduler is: operations leave as effects, and completions carry their outcomes
(`fd_core.effects.operations`). A block that an operation reads or writes is pinned from the effect to the completion,
so that the block is granted to no other request, even if the request that the operation serves ends meanwhile.
"""

from __future__ import annotations

from typing import TypeVar

from fd_core.effects.operations import Cancel, CompileGrammar, Effect, Fetch, Load, LoadDecision, Lookup, Save, Send
from fd_core.kv.blocks import BlockPool
from fd_core.scheduling.requests import Request
from fd_core.types import IntArray

_Operation = TypeVar("_Operation", Lookup, Load, Save, Fetch, Send, CompileGrammar)


class Operations:
    """Numbers operations, pins their blocks, and collects the effects for the next call of the scheduler."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.next = 1
        """Number of the operation that begins next."""
        self.open: dict[int, tuple[Effect, Request | None, IntArray | None]] = {}
        """The effect of each open operation, the request that waits for it, and the blocks that it holds."""
        self.effects: list[Effect] = []
        """Effects to return from the next call: operations, and effects without a completion."""
        self.decisions: list[LoadDecision] = []
        """Load decisions to return from the next call, for the trace."""

    def begin(self, effect: _Operation, request: Request, blocks: IntArray | None = None) -> int:
        """Begin an operation, with the number `next`, that holds `blocks`; return the number."""
        if blocks is not None:
            self._pool.pin(blocks)
            blocks.setflags(write=False)
        number = self.next
        self.next += 1
        self.open[number] = effect, request, blocks
        self.effects.append(effect)
        return number

    def cancel(self, number: int | None) -> None:
        """Cancel an operation, if any, that no request waits for; it holds its blocks until it ends."""
        if number is not None:
            effect, _, blocks = self.open[number]
            self.open[number] = effect, None, blocks
            self.effects.append(Cancel(number))

    def end(self, number: int, kind: type[_Operation]) -> tuple[_Operation, Request | None]:
        """Close an operation; return its effect, and its request if that still waits.

        Raises `RuntimeError` if none of that kind is open.
        """
        effect, request, blocks = self.open.pop(number, (None, None, None))
        if not isinstance(effect, kind):
            raise RuntimeError(f"operation {number} was completed, but is not open or is of another kind")
        if blocks is not None:
            self._pool.unpin(blocks)
        return effect, request

    def take(self) -> tuple[tuple[Effect, ...], tuple[LoadDecision, ...]]:
        """Return the effects and decisions since the last call, in order."""
        taken = tuple(self.effects), tuple(self.decisions)
        self.effects.clear()
        self.decisions.clear()
        return taken
