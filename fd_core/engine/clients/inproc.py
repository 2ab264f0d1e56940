"""An engine in a thread of this process, for tests and notebooks."""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
import time
from collections.abc import Coroutine
from pathlib import Path

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.clients.client import SingleEngineClient, StartProgress
from fd_core.engine.core import Engine
from fd_core.engine.device import DeviceStalled
from fd_core.engine.process.messages import Activities, ClientMessage, Controlled, EngineMessage, Shutdown, StepEvents
from fd_core.engine.process.service import admission_notifier, serve_engine
from fd_core.errors import EngineDead

_log = logging.getLogger(__name__)


class _QueueInbox:
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[ClientMessage | None] = queue.SimpleQueue()
        """Messages from the client; None ends a wait without a message."""

    def receive(self, timeout: float) -> list[ClientMessage]:
        messages: list[ClientMessage | None] = []
        try:
            if timeout:
                messages.append(self.queue.get(timeout=timeout))
            while True:
                messages.append(self.queue.get_nowait())
        except queue.Empty:
            return [message for message in messages if message is not None]

    def wake(self) -> None:
        self.queue.put(None)


class InprocClient(SingleEngineClient):
    """Client of an engine that runs in a thread.

    A step that fails ends that engine; another one is loaded and resumes its requests. A step that stalls ends all
    requests for good: a thread cannot be ended from outside and keeps the model's memory, so only a separate process
    (`fd_core.engine.clients.process`) allows an engine to be replaced then.
    """

    def __init__(self, config: EngineConfig, path: Path | None) -> None:
        super().__init__(config)
        self._path = path
        self._epoch = 0
        self._inbox = _QueueInbox()
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_sign = time.monotonic()
        self._closing = False

    @classmethod
    async def open(cls, config: EngineConfig, path: Path | None, progress: StartProgress) -> InprocClient:
        """Load the engine in a thread and start it."""
        client = cls(config, path)
        await client._start(progress)
        client._begin(client._watch())
        return client

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Let requests finish for up to `drain_seconds`, abort the rest and end the thread."""
        self._closing = True
        if self.alive and self._thread is not None:
            if drain_seconds > 0:
                self._send(Shutdown(drain=True))
                await asyncio.to_thread(self._thread.join, drain_seconds)
            self._send(Shutdown(drain=False))
            # A thread that is stuck in a step is abandoned; it is a daemon.
            await asyncio.to_thread(self._thread.join, max(self._config.watchdog_seconds, 1.0))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all("the engine was closed")
        self._thread = None

    def _send(self, message: ClientMessage) -> None:
        self._inbox.queue.put(message)

    async def _start(self, progress: StartProgress) -> None:
        """Load an engine for the next epoch and run it in a separate thread."""
        self._epoch += 1
        inbox = _QueueInbox()
        engine = await asyncio.to_thread(self._load, progress, inbox)
        self._inbox = inbox
        self._last_sign = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(engine, inbox), name="fdcore-engine", daemon=True)
        self._engine_ready(engine.info)
        self._thread.start()

    def _load(self, progress: StartProgress, inbox: _QueueInbox) -> Engine:
        admitted = admission_notifier(self._deliver, self._epoch)
        engine = load_engine(
            self._config, self._path, epoch=self._epoch, progress=progress, wake=inbox.wake, admitted=admitted
        )
        if self._closing:
            engine.close()
            raise EngineDead("the engine was closed")
        return engine

    def _run(self, engine: Engine, inbox: _QueueInbox) -> None:
        failure: EngineDead | None = None
        try:
            serve_engine(engine, inbox, self._deliver)
        except Exception as error:  # noqa: BLE001 - the last frame of the thread: notify the readers, then end
            _log.exception("the engine failed")
            failure = error if isinstance(error, EngineDead) else EngineDead(str(error))
            if not isinstance(error, DeviceStalled):
                engine.close()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended, failure)

    def _deliver(self, message: EngineMessage) -> None:
        self._last_sign = time.monotonic()
        if isinstance(message, StepEvents):
            self._loop.call_soon_threadsafe(self._dispatch, message)
        elif isinstance(message, Activities):
            self._loop.call_soon_threadsafe(self._reported, message.by_id)
        elif isinstance(message, Controlled):
            self._loop.call_soon_threadsafe(self._controlled, message)

    def _ended(self, failure: EngineDead | None) -> None:
        reason = "the engine was closed" if failure is None else f"the engine failed: {failure}"
        if failure is None or self._closing:
            self._fail_all(reason)
        elif isinstance(failure, DeviceStalled):
            self._fail(reason)
        else:
            self._engine_lost(reason, failure.field)
            self._begin(self._restart())

    def _fail(self, failure: str) -> None:
        self._retire(f"{failure}; a thread cannot be replaced, so restart the server")

    async def _restart(self) -> None:
        failure = await self._start_replacement(self._restart_once)
        if failure is None:
            _log.warning("engine restarted as epoch %d", self._epoch)
        else:
            self._retire(failure)

    async def _restart_once(self) -> None:
        gc.collect()  # frees the model and the KV cache of the engine that failed
        try:
            await self._start(lambda *_: None)
        except Exception as error:
            raise EngineDead(f"{type(error).__name__}: {error}") from error

    async def _watch(self) -> None:
        """Give up if requests wait and the thread is silent for longer than the watchdog allows."""
        watchdog = self._config.watchdog_seconds
        busy_since: float | None = None
        while True:
            await asyncio.sleep(watchdog / 4)
            now = time.monotonic()
            if not (self.alive and self.computes):
                busy_since = None
                continue
            busy_since = now if busy_since is None else busy_since
            silent = now - max(busy_since, self._last_sign)
            # The engine's own watchdog of its device fires first, because its error is more specific.
            if silent >= 1.5 * watchdog:
                self._fail(f"the engine did not respond for {silent:.0f} s while requests were running")

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Give up if a task failed: the engine is no longer restarted or monitored."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task that monitors the engine failed", exc_info=error)
            self._fail(f"a task that monitors the engine failed: {type(error).__name__}")
