"""An engine's process as its client holds it: started before the model is known, which it receives later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fd_core.backends.device_assignment import DeviceAssignment
from fd_core.errors import EngineDead
from fd_core.launching.child import child_command, child_socket


class EngineProcess:
    """One process that serves one epoch of an engine."""

    def __init__(self, process: asyncio.subprocess.Process, own: socket.socket) -> None:
        self.process = process
        self.socket = own
        """Connected to the engine, which ends once it is closed: by its reader or `close`."""

    @classmethod
    async def begin(cls, backend: str, assignment: DeviceAssignment | None = None) -> EngineProcess:
        """Start a process at `assignment`, which waits for a `Start`. Raises `EngineDead` if the system refuses."""
        where = assignment or DeviceAssignment()
        try:
            with child_socket() as (own, engines):
                process = await asyncio.create_subprocess_exec(
                    *child_command(where.cores, "-m", "fd_core.engine.process.child", backend),
                    stdin=engines,
                    start_new_session=True,
                    env=os.environ | where.environment,
                )
        except OSError as error:
            raise EngineDead(f"starting the engine's process failed: {error}") from error
        return cls(process, own)

    async def close(self) -> None:
        """End the process, if it has not ended, and wait for its end."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        await self.process.wait()
        self.socket.close()


@asynccontextmanager
async def prestarted_process(backend: str, *, wanted: bool = True) -> AsyncIterator[EngineProcess | None]:
    """Start an engine's process for the block, which finds the model meanwhile; None unless it is `wanted`."""
    prestarted = await EngineProcess.begin(backend) if wanted else None
    try:
        yield prestarted
    finally:
        if prestarted is not None:
            await prestarted.close()
