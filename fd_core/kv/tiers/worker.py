"""A thread that does jobs in the order in which they were posted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Worker"]

Job = Callable[[], None]


class Worker:
    """A daemon thread and its jobs; posting never blocks. A job that is stuck does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; jobs that were posted before are done then."""
        self._thread.start()

    def post(self, job: Job) -> None:
        """Have `job` done after all that were posted before it."""
        self._jobs.put(job)

    def finish(self) -> None:
        """Have the thread end after the jobs posted so far."""
        self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end; return whether it came within `seconds`."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def run_one(self) -> bool:
        """Do the oldest job on the caller's thread, if there is one; for a worker that was not started."""
        try:
            job = self._jobs.get_nowait()
        except queue.Empty:
            return False
        if job is not None:
            job()
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - a fault of this program, shown as such; later jobs go on
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread)))
            del job  # what it holds, such as arrays, must not live until the next job comes
