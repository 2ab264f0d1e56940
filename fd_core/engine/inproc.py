"""An engine in a thread of this process, for tests and notebooks."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from pathlib import Path

from fd_core.config import EngineConfig
from fd_core.engine.client import StartProgress
from fd_core.engine.core import Engine, load_engine
from fd_core.engine.messages import ClientMessage, EngineMessage, Shutdown, StepEvents
from fd_core.engine.service import serve_engine
from fd_core.engine.streams import StreamingClient

__all__ = ["InprocClient"]

_log = logging.getLogger(__name__)


class _QueueInbox:
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[ClientMessage] = queue.SimpleQueue()

    def receive(self, timeout: float) -> list[ClientMessage]:
        messages: list[ClientMessage] = []
        try:
            if timeout:
                messages.append(self.queue.get(timeout=timeout))
            while True:
                messages.append(self.queue.get_nowait())
        except queue.Empty:
            return messages


class InprocClient(StreamingClient):
    """Speaks to an engine that runs in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox = _QueueInbox()
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None

    @classmethod
    async def open(cls, config: EngineConfig, path: Path | None, progress: StartProgress) -> InprocClient:
        """Load the engine in a thread and start it."""
        client = cls()
        engine = await asyncio.to_thread(load_engine, config, path, progress=progress)
        client.start(engine)
        return client

    def start(self, engine: Engine) -> None:
        """Run a loaded engine in a thread."""
        self._came_up(engine.info)
        self._thread = threading.Thread(target=self._run, args=(engine,), name="fdcore-engine", daemon=True)
        self._thread.start()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Let requests finish for up to `drain_seconds`, abort the rest and end the thread."""
        if self._thread is None:
            return
        if drain_seconds > 0:
            self._send(Shutdown(drain=True))
            await asyncio.to_thread(self._thread.join, drain_seconds)
        self._send(Shutdown(drain=False))
        await asyncio.to_thread(self._thread.join)
        self._went_down("the engine was closed")
        self._thread = None

    def _send(self, message: ClientMessage) -> None:
        self._inbox.queue.put(message)

    def _run(self, engine: Engine) -> None:
        reason = "the engine was closed"
        try:
            serve_engine(engine, self._inbox, self._deliver)
        except Exception as error:  # noqa: BLE001 - the last frame of the thread: tell the readers, then end
            _log.exception("the engine failed")
            reason = f"the engine failed: {error}"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._went_down, reason)

    def _deliver(self, message: EngineMessage) -> None:
        if isinstance(message, StepEvents):
            self._loop.call_soon_threadsafe(self._dispatch, message)
