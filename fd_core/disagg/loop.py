"""A thread that turns: does what was posted, what its sockets bring, what is due, and a bit of work at a time."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq

__all__ = ["Loop"]

Job = Callable[[], None]

_LONGEST_NAP: Final = 60.0


class Loop:
    """Owns ZeroMQ sockets on one thread. Posting never waits; what a job raises is shown and ends only that job.

    `turn` is called after every round of jobs and messages; it returns how many seconds it can wait for the next, 0 if
    there is work left. `end` is called once on the thread, after the last turn.
    """

    def __init__(self, name: str, turn: Callable[[], float], end: Job) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._turn = turn
        self._end = end
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._stopping = False
        self._rung = False
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._ear, zmq.POLLIN)
        self._readers: dict[Any, Job] = {}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, job: Job) -> bool:
        """Have `job` done soon; return False if it will not be, as the thread was stopped. Any thread."""
        with self._lock:
            if self._stopping:
                return False
            self._jobs.append(job)
            self._ring()
            return True

    def stop(self) -> None:
        """Have the thread end after the jobs that were posted before. Any thread."""
        with self._lock:
            self._stopping = True
            self._ring()

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end; return whether it came within `seconds`."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def watch(self, source: zmq.Socket[bytes], read: Job) -> None:
        """Have `read` called whenever there is something to read. On the thread, or before it starts."""
        self._poller.register(source, zmq.POLLIN)
        self._readers[source] = read

    def forget(self, source: zmq.Socket[bytes]) -> None:
        """Take `watch` back."""
        self._poller.unregister(source)
        del self._readers[source]

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):
                self._bell.send(b"\0")

    def _run(self) -> None:
        seconds = 0.0
        try:
            while True:
                ready = self._poller.poll(math.ceil(min(seconds, _LONGEST_NAP) * 1000))
                for source, _ in ready:
                    # One reader may have taken another's socket away.
                    if (read := self._readers.get(source)) is not None:
                        self._do(read)
                jobs, stopping = self._take()
                for job in jobs:
                    self._do(job)
                if stopping:
                    return
                seconds = self._next()
        finally:
            with self._lock:
                self._stopping = True  # whatever ended the loop: nothing that is posted from here on would be done
            self._do(self._end)
            with self._lock:
                self._rung = True
                self._bell.close()
                self._ear.close()

    def _take(self) -> tuple[list[Job], bool]:
        with self._lock:
            if self._rung:
                self._rung = False
                with contextlib.suppress(BlockingIOError):
                    self._ear.recv(16)
            jobs = list(self._jobs)
            self._jobs.clear()
            return jobs, self._stopping

    def _next(self) -> float:
        seconds = [1.0]

        def turn() -> None:
            seconds[0] = self._turn()

        self._do(turn)
        return max(0.0, seconds[0])

    def _do(self, job: Job) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - a fault of this program, shown as such; leases end by their time
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread)))
