"""A process that makes and compiles grammars, run by `fd_core.launching.child`: `-m fd_core.structured.workers.child`.

Standard input is a socket to the server: the vocabulary is sent first, then one task after the other. When the socket
closes, the process ends even during a task, because the server has ended.
"""

from __future__ import annotations

import json
import math
import os
import resource
import threading
import time
from typing import Final

import msgspec

from fd_core.launching.child import become_child
from fd_core.launching.message_stream import MessageStream
from fd_core.structured.compiler import LARGE_GRAMMAR, GrammarCompiler, VocabularyTable, lower_priority
from fd_core.structured.grammar import RequestedConstraint
from fd_core.structured.workers.grammar_builder import GrammarBuilder
from fd_core.structured.workers.messages import CPU_SECONDS

_MEMORY: Final = 2**31
"""Limit of the address space in bytes; the libraries and the vocabulary take a few hundred million."""
_STACK: Final = 3 * 2**19
"""Bytes. The engine compiles on threads with larger ones, so that a grammar whose rules nest too deeply ends this
process and no other."""


def main() -> None:
    """Serve the process that holds the other end of standard input, until it closes it."""
    become_child()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    server = MessageStream.to_parent()
    threading.stack_size(_STACK)
    inbox = iter(server)
    if (table := next(inbox, None)) is None:
        return
    vocabulary = msgspec.msgpack.decode(table, type=VocabularyTable).vocabulary()
    compiler = GrammarCompiler(lambda: vocabulary)
    compiler.warm_up()
    server.send(b"")
    for task in inbox:
        until = math.ceil(time.process_time()) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        # This thread continues to monitor the socket.
        threading.Thread(target=_answer, args=(server, compiler, task), daemon=True).start()
    os._exit(0)


def _answer(server: MessageStream, compiler: GrammarCompiler, task: bytes) -> None:
    lower_priority(is_large=len(task) > LARGE_GRAMMAR)
    try:
        outcome = GrammarBuilder(compiler.refusal).outcome(msgspec.convert(json.loads(task), RequestedConstraint))
    except BaseException:  # noqa: BLE001 - the library panics with errors that are not an `Exception`
        os._exit(1)
    server.send(msgspec.msgpack.encode(outcome))
    server.flush(wait=True)


if __name__ == "__main__":
    main()
