"""The process boundary: an engine in a process of its own, spoken to over ZeroMQ on a private Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from fd_core.config import EngineConfig
from fd_core.engine.client import StartProgress
from fd_core.engine.messages import ClientMessage, EngineMessage, Fault, Progress, Ready, Shutdown, StepEvents
from fd_core.engine.restarting import GAVE_UP, start_again
from fd_core.engine.streams import StreamingClient
from fd_core.errors import ConfigError, EngineDead, FdError, ModelError, PluginError

__all__ = ["ProcessClient", "Start"]

_log = logging.getLogger(__name__)
_ERRORS: dict[int, type[FdError]] = {error.exit_code: error for error in (ConfigError, ModelError, PluginError)}
_START_SECONDS = 600.0
"""An engine that gives no sign for so long while it starts in a dead one's place is taken for stuck."""


class Start(msgspec.Struct, frozen=True):
    """What an engine's process is told on its standard input."""

    address: str
    config: EngineConfig
    path: str | None
    epoch: int


class ProcessClient(StreamingClient):
    """Speaks to an engine in a child process; if it dies, starts another that takes up its requests in a new epoch."""

    def __init__(self, config: EngineConfig, path: Path | None) -> None:
        super().__init__()
        self._config = config
        self._path = path
        self._epoch = 0
        self._folder = Path(tempfile.mkdtemp(prefix="fdcore-"))
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._arrival: asyncio.Future[bytes] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def open(cls, config: EngineConfig, path: Path | None, progress: StartProgress) -> ProcessClient:
        """Start the process and wait until it is ready."""
        client = cls(config, path)
        try:
            await client._start(progress)
        except BaseException:
            await client.close()
            raise
        client._keeper = asyncio.create_task(client._keep())
        return client

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while there is one."""
        return self._process.pid if self._process is not None else None

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Let requests finish for up to `drain_seconds`, abort the rest and end the process."""
        self._closing = True
        process = self._process
        if process is not None and process.returncode is None and self._alive:
            if drain_seconds > 0:
                self._send(Shutdown(drain=True))
                await _wait(process, drain_seconds)
            if process.returncode is None:
                self._send(Shutdown(drain=False))
                await _wait(process, 5.0)
        if self._keeper is not None:
            # Before the process is killed: it may be starting another.
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        await self._reap()
        self._went_down("the engine was closed")
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Inside -----------------------------------------------------------------------------------------------

    def _send(self, message: ClientMessage) -> None:
        if self._socket is None:
            raise EngineDead(self._death)
        # The high-water mark is off, so a send only queues; its future is done at once.
        self._socket.send(self._encoder.encode(message))

    async def _start(self, progress: StartProgress, patience: float | None = None) -> None:
        """Start a process for the next epoch and read its messages until it is ready.

        Raises `EngineDead` if it ends or gives no sign for `patience` seconds, and what loading raises.
        """
        self._epoch += 1
        address = f"ipc://{self._folder}/engine-{self._epoch}"
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(address)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "fd_core.engine.child", stdin=asyncio.subprocess.PIPE, start_new_session=True
            )
            await self._tell(Start(address, self._config, str(self._path) if self._path else None, self._epoch))
        except OSError as error:
            raise EngineDead(f"the engine's process could not be started: {error}") from error
        while not self._alive:
            message = await self._receive(patience)
            if message is None:
                raise EngineDead(f"the engine gave no sign for {patience:g} s while it started")
            self._handle(message, progress)

    async def _tell(self, start: Start) -> None:
        pipe = self._process.stdin if self._process is not None else None
        if pipe is None:
            raise EngineDead("the engine's process has no standard input")
        pipe.write(msgspec.json.encode(start) + b"\n")
        await pipe.drain()
        # The pipe stays open: its end tells the engine that this process is gone.

    async def _next(self) -> EngineMessage:
        """Return the next message; raises `EngineDead` if requests wait for longer than the watchdog allows."""
        patience = self._config.watchdog_seconds
        silent = 0.0
        while True:
            begun = time.monotonic()
            message = await self._receive(patience / 4)
            if message is not None:
                return message
            silent = silent + time.monotonic() - begun if self.active_requests else 0.0
            if silent >= patience:
                raise EngineDead(f"the engine gave no sign for {silent:.0f} s while requests were running")

    async def _receive(self, timeout: float | None = None) -> EngineMessage | None:
        """Return the next message, None after `timeout` seconds; raises `EngineDead` if the process ends first."""
        process, socket = self._process, self._socket
        if process is None or socket is None:
            raise EngineDead(self._death)
        if self._arrival is None:
            # Kept until it is done, however often the wait for it is given up: a message is never dropped.
            self._arrival = asyncio.ensure_future(socket.recv())
        death = asyncio.ensure_future(process.wait())
        try:
            signs: set[asyncio.Future[Any]] = {self._arrival, death}
            done, _ = await asyncio.wait(signs, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if death in done and not self._arrival.done():
                # What the process sent before its end may still be on its way.
                await asyncio.wait({self._arrival}, timeout=0.2)
        finally:
            death.cancel()
        if self._arrival.done():
            frame, self._arrival = self._arrival.result(), None
            message: EngineMessage = self._decoder.decode(frame)
            return message
        if death in done:
            raise EngineDead(f"the engine's process ended with exit code {process.returncode}")
        return None

    def _handle(self, message: EngineMessage, progress: StartProgress) -> None:
        match message:
            case StepEvents():
                self._dispatch(message)
            case Ready(info):
                self._came_up(info)
            case Progress(phase, done, total):
                progress(phase, done, total)
            case Fault(text, field, hint, code):
                raise _ERRORS.get(code, EngineDead)(text, field=field, hint=hint)

    async def _keep(self) -> None:
        """Pass messages on; when the engine dies, start another, which takes up its requests."""
        try:
            while True:
                reason = await self._serve()
                if self._closing:
                    return
                _log.error("engine of epoch %d is gone: %s", self._epoch, reason)
                self._went_away(f"the engine failed: {reason}")
                if not await start_again(self._start_another):
                    return
                _log.warning("engine restarted as epoch %d", self._epoch)
        finally:
            # Whatever ended this watch: no request may wait for an engine that nobody starts.
            if not self._closing:
                self._went_down(GAVE_UP)

    async def _serve(self) -> FdError:
        """Pass messages on until the engine dies; return of what."""
        try:
            while True:
                self._handle(await self._next(), lambda *_: None)
        except FdError as error:
            return error

    async def _start_another(self) -> None:
        await self._reap()
        await self._start(lambda *_: None, _START_SECONDS)

    async def _reap(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            await self._process.wait()
        self._close_socket()

    def _close_socket(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


async def _wait(process: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)
