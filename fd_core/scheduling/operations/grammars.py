"""Grammars, as the scheduler sees them: a request waits until its own is compiled, whenever it begins to wait.

waiting --CompileGrammar--> GrammarReady --> may be admitted, or ends because its grammar cannot be used
"""

from __future__ import annotations

from dataclasses import dataclass

from fd_core.effects.operations import Cancel, CompileGrammar, GrammarReady
from fd_core.scheduling.operations.registry import Operations
from fd_core.scheduling.requests import Request


@dataclass(frozen=True, slots=True)
class _Compiling:
    request: Request


@dataclass(slots=True)
class GrammarCompiling:
    """Has grammars compiled; owned by one scheduler."""

    operations: Operations

    def begin_wait(self, request: Request) -> int | None:
        """Return the operation that a request waits for from now on; None for a request without a grammar."""
        grammar = request.spec.params.grammar
        if grammar is None:
            return None
        request.compiling = number = self.operations.begin(_Compiling(request))
        self.operations.effects.append(CompileGrammar(number, grammar))
        return number

    def ready(self, answer: GrammarReady) -> Request | None:
        """A grammar is compiled, or cannot be; return the request that waits for it, None if it left meanwhile."""
        request = self.operations.end(answer.operation, _Compiling).request
        if request.compiling != answer.operation:
            return None
        request.compiling = None
        return request

    def leave(self, request: Request) -> None:
        """A waiting request ended: nobody waits for its grammar."""
        if request.compiling is not None:
            self.operations.effects.append(Cancel(request.compiling))
            request.compiling = None
