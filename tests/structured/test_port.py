"""The compile port: a large grammar blocks no other, and an engine without grammars starts no thread."""

from __future__ import annotations

import threading
import time

from fd_core.effects.operations import Cancel, CompileGrammar, Completion, GrammarReady
from fd_core.effects.port import CompletionQueue
from fd_core.structured.compiler import LARGE_GRAMMAR, CompilerStats, GrammarError
from fd_core.structured.workers.port import GrammarPort

LARGE = "x" * (LARGE_GRAMMAR + 1)


class SlowCompiler:
    """Compiles large grammars once released; rejects `bad`."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.compiled: list[str] = []

    def is_cached(self, grammar: str) -> bool:
        return grammar in self.compiled

    def matcher(self, grammar: str) -> None:
        if grammar == "bad":
            raise GrammarError("it is bad")
        if len(grammar) > LARGE_GRAMMAR:
            assert self.released.wait(60)
        self.compiled.append(grammar)

    def stats(self) -> CompilerStats:
        return CompilerStats(compiled=len(self.compiled))


def port(compiler: SlowCompiler) -> GrammarPort:
    return GrammarPort(CompletionQueue(lambda: None), compiler)  # type: ignore[arg-type]  # all that the port calls


def answers(of: GrammarPort, count: int) -> list[Completion]:
    found: list[Completion] = []
    ends = time.monotonic() + 60
    while len(found) < count and time.monotonic() < ends:
        found += of.completions()
        time.sleep(0.005)
    return found


def grammar_threads() -> int:
    return sum("grammars" in thread.name for thread in threading.enumerate())


def test_small_grammar_does_not_wait_for_a_large_one() -> None:
    compiler = SlowCompiler()
    compiling = port(compiler)
    compiling.perform([CompileGrammar(1, LARGE), CompileGrammar(2, "small"), CompileGrammar(3, "bad")])
    assert answers(compiling, 2) == [GrammarReady(2, None), GrammarReady(3, "it is bad")]
    compiler.released.set()
    assert answers(compiling, 1) == [GrammarReady(1, None)]
    compiling.perform([CompileGrammar(4, LARGE)])
    assert compiling.completions() == [GrammarReady(4, None)], "it was compiled already"
    compiling.close()


def test_threads_start_on_demand_and_end_with_the_port() -> None:
    before = grammar_threads()
    compiling = port(SlowCompiler())
    assert grammar_threads() == before
    compiling.perform([CompileGrammar(1, "small")])
    assert len(answers(compiling, 1)) == 1
    assert grammar_threads() == before + 1
    compiling.close()
    assert grammar_threads() == before


def test_cancelled_compilation_completes_once() -> None:
    compiler = SlowCompiler()
    compiling = port(compiler)
    compiling.perform([CompileGrammar(1, LARGE), Cancel(1)])
    assert answers(compiling, 1)[0].operation == 1
    compiler.released.set()
    compiling.close()
    assert compiling.completions() == []
