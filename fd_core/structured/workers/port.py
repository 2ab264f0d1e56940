"""Port that compiles grammars on separate threads, so that neither a step nor another request waits for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar, Final

from fd_core.effects.operations import Cancel, CompileGrammar, Effect, GrammarReady
from fd_core.effects.pending import PendingOperations
from fd_core.effects.port import CompletionQueue, EffectPort
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.structured.compiler import LARGE_GRAMMAR, CompilerStats, GrammarCompiler, GrammarError, lower_priority

_log = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 2.0


class GrammarPort(EffectPort[CompilerStats]):
    """Answers a `CompileGrammar` once the compiler has the grammar, at once if it had it before."""

    performs: ClassVar = (CompileGrammar,)

    def __init__(
        self,
        queue: CompletionQueue,
        compiler: GrammarCompiler,
        *,
        compile_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A request waits `compile_seconds` at most; a thread starts with the first grammar of its size."""
        super().__init__(queue)
        self._compiler = compiler
        self._compile_seconds = compile_seconds
        self._clock = clock
        self._pending: PendingOperations[GrammarReady] = PendingOperations(queue.put)
        self._small = ThreadLoop("fdcore-grammars")
        self._small.post(partial(lower_priority, is_large=False))
        self._large = ThreadLoop("fdcore-large-grammars")
        self._large.post(partial(lower_priority, is_large=True))
        self._started: set[ThreadLoop] = set()
        self._closed = False

    def perform(self, effects: Iterable[Effect]) -> None:
        """Begin to compile, or cancel a compilation."""
        for effect in effects:
            match effect:
                case CompileGrammar(operation, grammar) if self._compiler.is_cached(grammar):
                    self._queue.put(GrammarReady(operation, self._try(grammar)))
                case CompileGrammar(operation, grammar):
                    loop = self._large if len(grammar) > LARGE_GRAMMAR else self._small
                    late = f"compilation exceeded {self._compile_seconds:g} s"
                    self.idle = False
                    self._pending.begin(GrammarReady(operation, late), self._clock() + self._compile_seconds)
                    if not loop.post(partial(self._compile, effect)):
                        self._pending.end(operation)
                    elif loop not in self._started:
                        self._started.add(loop)
                        loop.start()
                case Cancel(operation):
                    self._pending.end(operation)

    def tend(self) -> None:
        """Complete the grammars that take too long."""
        self._pending.expire(self._clock())
        self.idle = not len(self._pending)

    def stats(self) -> CompilerStats:
        """Return counters and gauges of the compiler."""
        return self._compiler.stats()

    def close(self) -> None:
        """Complete every operation and end the thread, without joining one that compiles too long. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for operation in self._pending.numbers():
            self._pending.end(operation)
        for loop in (self._small, self._large):
            loop.stop()
        if [loop for loop in (self._small, self._large) if not loop.join(_CLOSE_SECONDS)]:
            _log.warning("compiling a grammar takes too long; its thread is abandoned")

    # The thread -------------------------------------------------------------------------------------------

    def _compile(self, effect: CompileGrammar) -> None:
        if effect.operation in self._pending:
            self._pending.finish(GrammarReady(effect.operation, self._try(effect.grammar)))

    def _try(self, grammar: str) -> str | None:
        """Compile a grammar; return the reason why it cannot be used."""
        try:
            self._compiler.matcher(grammar)
        except GrammarError as error:
            return str(error)
        return None
