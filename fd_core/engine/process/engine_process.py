"""An engine's process as its client holds it: begun before the model is known, told later what to load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import msgspec

from fd_core.backends.places import EnginePlace
from fd_core.config import EngineConfig
from fd_core.errors import ConfigError, EngineDead


class Prepare(msgspec.Struct, frozen=True):
    """The first line on the standard input of an engine's process: what it can do before it knows the model."""

    descriptor: int
    """Its end of the pair of sockets, which it inherits."""
    backend: str
    """As `EngineConfig.backend`; its framework is imported."""


class Start(msgspec.Struct, frozen=True):
    """The second line: what to load and serve."""

    config: EngineConfig
    path: str | None
    epoch: int


class EngineProcess:
    """One process that serves one epoch of an engine."""

    def __init__(self, process: asyncio.subprocess.Process, own: socket.socket) -> None:
        self.process = process
        self.socket = own
        """Speaks to the engine; closed by whoever reads it, and by `close`."""

    @classmethod
    async def begin(cls, backend: str, place: EnginePlace | None = None) -> EngineProcess:
        """Start a process that imports what `backend` needs and waits for `start`; `place` is where it computes.

        Raises `EngineDead` if the system refuses.
        """
        where = place or EnginePlace()
        own, engines = socket.socketpair()
        async with contextlib.AsyncExitStack() as undone:
            undone.callback(own.close)
            try:
                with engines:
                    process = await asyncio.create_subprocess_exec(
                        # -P: no module of the folder in which somebody happens to start it.
                        *(
                            sys.executable,
                            "-P",
                            "-m",
                            "fd_core.engine.process.child_on_cores",
                            ",".join(map(str, where.cores)),
                        ),
                        stdin=asyncio.subprocess.PIPE,
                        start_new_session=True,
                        pass_fds=(engines.fileno(),),
                        env=os.environ | where.environment,
                    )
                    begun = cls(process, own)
                    undone.push_async_callback(begun.close)
                    await begun._tell(Prepare(engines.fileno(), backend))
            except OSError as error:
                raise EngineDead(f"the engine's process could not be started: {error}") from error
            undone.pop_all()
        return begun

    async def start(self, start: Start) -> None:
        """Have the process load and serve. Why it could not, if it ended before, is what it said on the socket."""
        with contextlib.suppress(OSError):
            await self._tell(start)

    async def close(self) -> None:
        """End the process, if it has not ended, and wait until it is gone."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        await self.process.wait()
        self.socket.close()

    async def _tell(self, line: Prepare | Start) -> None:
        # The pipe stays open: its end tells the engine that this process is gone.
        pipe = cast("asyncio.StreamWriter", self.process.stdin)
        try:
            pipe.write(msgspec.json.encode(line) + b"\n")
        except UnicodeEncodeError:
            raise ConfigError("a path or name in the settings is not UTF-8", hint="rename it, or use a link") from None
        await pipe.drain()


@asynccontextmanager
async def begun_process(backend: str, *, wanted: bool = True) -> AsyncIterator[EngineProcess | None]:
    """Begin an engine's process for the block, which looks for the model meanwhile; None unless it is `wanted`."""
    begun = await EngineProcess.begin(backend) if wanted else None
    try:
        yield begun
    finally:
        if begun is not None:
            await begun.close()
