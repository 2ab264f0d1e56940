"""Servers that several pages start with the same command: each is started once and lent to one page at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.documents.blocks import ROOT
from tests.server.processes import free_port, process

__all__ = ["Lent", "LentServers"]


@dataclass(frozen=True, slots=True)
class Lent:
    """Running server."""

    words: tuple[str, ...]
    port: int
    log: Path
    process: subprocess.Popen[bytes]


class LentServers:
    """Pool of the servers; `close` ends each with Ctrl-C, the last one first, in order and without a traceback."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder = folder
        self._settings = settings
        self._servers: list[Lent] = []
        self._out: set[int] = set()
        self._stack = ExitStack()

    def close(self) -> None:
        """End every server."""
        self._stack.close()

    @contextmanager
    def lend(self, words: Sequence[str]) -> Iterator[Lent]:
        """Lend an unused server of `fdcore WORDS` to the block; start one if there is none."""
        free = (each for each in self._servers if each.words == tuple(words) and each.port not in self._out)
        lent = next(free, None) or self._start(tuple(words))
        self._out.add(lent.port)
        try:
            yield lent
        finally:
            self._out.discard(lent.port)

    def _start(self, words: tuple[str, ...]) -> Lent:
        port, folder = free_port(), self._folder / str(len(self._servers))
        folder.mkdir()
        ports = ["--port", str(port)] + (["--admin-port", str(free_port())] if words[0] == "route" else [])
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "FD_BATCH_STORE": str(folder / "batches"),
            **self._settings,
        }
        log = folder / "log"
        command = (sys.executable, "-m", "fd_core.cli", *words, *ports)
        started = self._stack.enter_context(process(log, *command, cwd=folder, env=environment))
        self._servers.append(Lent(words, port, log, started))
        return self._servers[-1]
