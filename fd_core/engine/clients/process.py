"""The process boundary: an engine in a separate process, connected by sockets that no other process can reach."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Final

import msgspec

from fd_core.backends.device_assignment import DeviceAssignment
from fd_core.config import EngineConfig
from fd_core.engine.clients.client import SingleEngineClient, StartProgress
from fd_core.engine.process import messages
from fd_core.engine.process.engine_process import EngineProcess
from fd_core.errors import ConfigError, EngineDead, FdError
from fd_core.launching.message_stream import MessageSocket

_log = logging.getLogger(__name__)
_START_SECONDS = 600.0
"""Timeout of a start without any progress message, in seconds."""
_POLLS_PER_TIMEOUT: Final = 4
"""Polls of an engine within the shortest time that it may be silent."""
_FINAL_MESSAGES_SECONDS: Final = 0.2
"""Messages of a dead process are still read if the gaps between them are at most this long, in seconds."""
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(messages.EngineMessage)


class ProcessClient(SingleEngineClient):
    """Client of an engine in a child process; if it dies, another one resumes its requests in a new epoch."""

    def __init__(
        self,
        config: EngineConfig,
        path: Path | None,
        progress: StartProgress,
        assignment: DeviceAssignment | None = None,
        prestarted: EngineProcess | None = None,
    ) -> None:
        super().__init__(config)
        self._path = path
        self._assignment = assignment or DeviceAssignment()
        self._progress = progress
        self._epoch = 0
        self._socket: MessageSocket | None = None
        self._prestarted = prestarted
        self._process: EngineProcess | None = None
        self._ready = asyncio.Event()
        """Set while the engine of this epoch is ready."""
        self._end: asyncio.Future[FdError] = asyncio.get_running_loop().create_future()
        """Error that ended the engine of this epoch."""
        self._watch: asyncio.Task[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def open(
        cls,
        config: EngineConfig,
        path: Path | None,
        progress: StartProgress,
        assignment: DeviceAssignment | None = None,
        prestarted: EngineProcess | None = None,
    ) -> ProcessClient:
        """Wait for a process with `assignment`, anywhere if None: the process `prestarted` if there is one."""
        client = cls(config, path, progress, assignment, prestarted)
        try:
            await client._start()
        except BaseException:
            await client.close()
            raise
        client._progress = lambda *_: None  # later loads show no progress
        client._supervisor = asyncio.create_task(client._supervise())
        return client

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while there is one."""
        return self._process.process.pid if self._process is not None else None

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Let requests finish for up to `drain_seconds`, abort the rest and end the process."""
        self._closing = True
        process = self._process.process if self._process is not None else None
        if process is not None and process.returncode is None and self.alive:
            if drain_seconds > 0:
                self._send(messages.Shutdown(drain=True))
                await _wait(process, drain_seconds)
            if process.returncode is None:
                self._send(messages.Shutdown(drain=False))
                await _wait(process, 5.0)
        # Before the process is killed: the keeper may be starting another.
        await _cancelled(self._supervisor)
        await self._reap()
        self._fail_all("the engine was closed")

    def _send(self, message: messages.ClientMessage) -> None:
        if self._socket is None:
            raise EngineDead(self._failure_reason)
        self._socket.send(_ENCODER.encode(message))

    async def _start(self) -> None:
        """Start a process for the next epoch. Raises `EngineDead` if it ends or stalls, and the errors of loading."""
        self._epoch += 1
        self._ready.clear()
        self._end = asyncio.get_running_loop().create_future()
        self._process = self._prestarted or await EngineProcess.begin(self._config.backend, self._assignment)
        self._prestarted = None
        self._socket = MessageSocket(self._process.socket, self._handle, self._failed)
        self._watch = asyncio.create_task(self._monitor(self._process.process, self._socket))
        path = str(self._path) if self._path else None
        try:
            self._send(messages.Start(self._config, path, self._epoch))
        except UnicodeEncodeError:
            raise ConfigError(
                "a path or name in the settings is not UTF-8", hint="rename it, or use a symbolic link"
            ) from None
        ready = asyncio.create_task(self._ready.wait())
        end: asyncio.Future[FdError] = self._end
        try:
            await asyncio.wait((ready, end), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if end.done():
            raise end.result()

    def _handle(self, frame: bytes) -> None:
        match message := _DECODER.decode(frame):
            case messages.StepEvents():
                self._dispatch(message)
            case messages.Activities(by_id):
                self._reported(by_id)
            case messages.Controlled():
                self._controlled(message)
            case messages.Ready(info):
                self._ready.set()
                self._engine_ready(info)
            case messages.Progress(phase, done, total):
                self._progress(phase, done, total)
            case messages.Fault():
                raise message.error()

    def _failed(self, error: Exception) -> None:
        if self._end.done() or isinstance(error, EOFError):  # the task that monitors the process records how it ended
            return
        if isinstance(error, FdError):
            self._end.set_result(error)
        else:
            self._end.set_exception(error)

    async def _monitor(self, process: asyncio.subprocess.Process, socket: MessageSocket) -> None:
        """Record the end of the process, or a watchdog timeout while it serves or starts."""
        watchdog = self._config.watchdog_seconds
        pause = min(watchdog, _START_SECONDS) / _POLLS_PER_TIMEOUT
        death = asyncio.create_task(process.wait())
        silent = 0.0
        try:
            while not death.done():
                serving, received, busy = self._ready.is_set(), socket.received, self.computes
                await asyncio.wait({death}, timeout=pause)
                expected = not serving or (busy and self.computes)
                # Polls are counted, not seconds: this process may have been suspended itself.
                silent = silent + pause if expected and socket.received == received else 0.0
                allowed = watchdog if serving else _START_SECONDS
                if silent >= allowed:
                    doing = "while requests were running" if serving else "while it started"
                    self._failed(EngineDead(f"the engine did not respond for {allowed:g} s {doing}"))
                    return
            while True:
                # Messages sent by the process before its end may still be in transit.
                received = socket.received
                await asyncio.sleep(_FINAL_MESSAGES_SECONDS)
                if socket.received == received:
                    break
            self._failed(EngineDead(f"the engine's process ended with exit code {process.returncode}"))
        except Exception as error:  # noqa: BLE001 - an engine without a monitor is restarted
            self._failed(EngineDead(f"monitoring the engine failed: {type(error).__name__}"))
        finally:
            death.cancel()

    async def _supervise(self) -> None:
        """Wait for the end of the engine and start another one, which resumes its requests."""
        failure: str | None = None
        try:
            while True:
                reason = await self._end
                if self._closing:
                    return
                _log.error("%s of epoch %d died: %s", self._assignment.name, self._epoch, reason)
                self._engine_lost(f"the engine failed: {reason}", reason.field)
                failure = await self._start_replacement(self._restart_once)
                if failure is not None:
                    return
                _log.warning("%s restarted as epoch %d", self._assignment.name, self._epoch)
        finally:
            # In any case, no request may wait for an engine that will never start.
            if not self._closing:
                self._retire(failure or "the engine is no longer monitored; restart the server")

    async def _restart_once(self) -> None:
        await self._reap()
        try:
            await self._start()
        except OSError as error:  # out of descriptors, processes or memory, which may be temporary
            raise EngineDead(f"starting its process failed: {(error.strerror or str(error)).lower()}") from error

    async def _reap(self) -> None:
        await _cancelled(self._watch)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            await self._process.close()


async def _wait(process: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
