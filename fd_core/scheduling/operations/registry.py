"""Operations outside steps: the registry of those that are open, with the KV blocks that they hold.

Pure, as the scheduler is: operations leave as effects, and completions say what became of them
(`fd_core.effects.operations`). A block that an operation reads or writes is pinned from the effect to the completion,
so that the block is granted to no other request, whatever happens meanwhile to the request that the operation serves.
"""

from __future__ import annotations

from typing import TypeVar

from fd_core.effects.operations import Cancel, CompileGrammar, Effect, Fetch, Load, LoadDecision, Lookup, Save, Send
from fd_core.kv.blocks import BlockPool
from fd_core.scheduling.requests import Request
from fd_core.types import IntArray

_Operation = TypeVar("_Operation", Lookup, Load, Save, Fetch, Send, CompileGrammar)


class Operations:
    """Numbers operations, pins their blocks, and collects what the next call of the scheduler returns."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.next = 1
        """Number of the operation that begins next."""
        self.open: dict[int, tuple[Effect, Request, IntArray | None]] = {}
        """The effect of each open operation, the request that it serves, and the blocks that it holds."""
        self.effects: list[Effect] = []
        """What waits to be returned: operations, and what no completion answers."""
        self.decisions: list[LoadDecision] = []
        """What waits to be told to the trace."""

    def begin(self, effect: _Operation, request: Request, blocks: IntArray | None = None) -> int:
        """Begin an operation, which has the number `next` and holds `blocks`; return the number."""
        if blocks is not None:
            self._pool.pin(blocks)
            blocks.setflags(write=False)
        number = self.next
        self.next += 1
        self.open[number] = effect, request, blocks
        self.effects.append(effect)
        return number

    def end(self, number: int, kind: type[_Operation]) -> tuple[_Operation, Request]:
        """Close an operation; return its effect and request. Raises `RuntimeError` if none of that kind is open."""
        effect, request, blocks = self.open.pop(number, (None, None, None))
        if not isinstance(effect, kind) or request is None:
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


class GrammarCompiling:
    """Has the grammars of waiting requests compiled: a request waits for its own, whenever it begins to wait."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def begin_wait(self, request: Request, grammar: str) -> int:
        """Return the operation that a request waits for from now on."""
        request.compiling = self._operations.begin(CompileGrammar(self._operations.next, grammar), request)
        return request.compiling

    def ready(self, number: int) -> Request | None:
        """A grammar is compiled, or cannot be; return the request that waits for it, None if it left meanwhile."""
        _, request = self._operations.end(number, CompileGrammar)
        if request.compiling != number:
            return None
        request.compiling = None
        return request

    def leave(self, request: Request) -> None:
        """A waiting request ended: nobody waits for its grammar."""
        if request.compiling is not None:
            self._operations.effects.append(Cancel(request.compiling))
            request.compiling = None
