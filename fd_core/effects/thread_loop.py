"""A thread that runs jobs in FIFO order, handles messages, and does incremental work in between."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import zmq

Job = Callable[[], object]
_Result = TypeVar("_Result")

Handler = Callable[[list[zmq.Frame]], object]

_LONGEST_SLEEP: Final = 60.0
"""Seconds."""
_BATCH: Final = 64
"""Messages of a socket per round, so that other sockets and other work of the thread do not wait long."""


class ThreadLoop:
    """A daemon thread with jobs and ZeroMQ sockets. Posting never blocks; an exception is logged and ends only its job.

    A message is handled after the jobs that were posted before it was sent: if a change is posted before a request is
    answered, the peer's next message meets it. A job that is stuck does not keep the process alive.
    """

    def __init__(self, name: str, turn: Callable[[], float] | None = None, end: Job | None = None) -> None:
        """`turn` runs after each round and returns seconds that the thread may sleep, 0 for none; `end` runs last."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._turn = turn
        self._end = end
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._stopping = False
        self._wake_pending = True  # no wake-up needed before the thread runs
        self._wake_writer: socket.socket | None = None
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Handler] = {}

    def start(self) -> None:
        """Start the thread; jobs that were posted before are done first."""
        self._thread.start()

    def post(self, job: Job) -> bool:
        """Run `job` after all that were posted before; return False if it never will run. Thread-safe."""
        with self._lock:
            if self._stopping:
                return False
            self._jobs.append(job)
            self._wake()
            return True

    def stop(self) -> None:
        """Stop the thread after the jobs that were posted before. Thread-safe."""
        with self._lock:
            self._stopping = True
            self._wake()

    def join(self, seconds: float) -> bool:
        """Join the thread; return True if it ended within `seconds`."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def watch(self, source: zmq.Socket[bytes], handle: Handler) -> None:
        """Register `handle` to be called with the frames of each message. On the thread, or before it starts."""
        self._poller.register(source, zmq.POLLIN)
        self._handlers[source] = handle

    def forget(self, source: zmq.Socket[bytes]) -> None:
        """Unregister a socket, whose messages are not handled any more. On the thread."""
        self._poller.unregister(source)
        del self._handlers[source]

    def run_one(self) -> bool:
        """Run the oldest job on the caller's thread, if there is one; for tests, with a loop that was not started."""
        if not self._jobs:
            return False
        self._do(self._jobs.popleft())
        return True

    def _wake(self) -> None:
        if not self._wake_pending and self._wake_writer is not None:
            self._wake_pending = True
            with contextlib.suppress(OSError):
                self._wake_writer.send(b"\0")

    def _run(self) -> None:
        wake_writer, wake_reader = socket.socketpair()
        for end in (wake_writer, wake_reader):
            end.setblocking(False)
        self._poller.register(wake_reader, zmq.POLLIN)
        with self._lock:
            self._wake_writer, self._wake_pending = wake_writer, False
        seconds = 0.0
        try:
            while True:
                # Rounded up: a thread that wakes early would spin until then.
                for source, _ in self._poller.poll(math.ceil(min(seconds, _LONGEST_SLEEP) * 1000)):
                    if source in self._handlers:
                        self._do(partial(self._handle, source))
                with self._lock:
                    if self._wake_pending:
                        self._wake_pending = False
                        with contextlib.suppress(BlockingIOError):
                            wake_reader.recv(16)
                    count, stopping = len(self._jobs), self._stopping
                for _ in range(count):
                    self._do(self._jobs.popleft())
                if stopping:
                    return
                seconds = _LONGEST_SLEEP
                if self._turn is not None:
                    pause = self._do(self._turn)
                    seconds = 1.0 if pause is None else max(0.0, pause)
        finally:
            with self._lock:
                self._stopping = True  # in any case: jobs posted from now on would never run
            if self._end is not None:
                self._do(self._end)
            with self._lock:
                self._wake_writer = None
            wake_writer.close()
            wake_reader.close()

    def _handle(self, source: Any) -> None:
        """Handle the messages of a socket that arrived, as long as no handler or job forgets it.

        What was posted before a message was received is done first.
        """
        for _ in range(_BATCH):
            if source not in self._handlers:
                return
            try:
                frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            for _ in range(len(self._jobs)):
                self._do(self._jobs.popleft())
            if (handle := self._handlers.get(source)) is not None:
                self._do(partial(handle, frames))

    def _do(self, job: Callable[[], _Result]) -> _Result | None:
        try:
            return job()
        except Exception as error:  # noqa: BLE001 - a bug of this program, logged as such; later jobs continue
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread)))
            return None
