"""Processes that simulate plans for `fdcore plan`: one job a line on standard input, one result a line on the other.

Run as a module it is such a process. It ends when its input closes.
"""

from __future__ import annotations

import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any

import msgspec

from fd_core.errors import ConfigError, FdError, PluginError
from fd_core.plugins import blamed_on_file, installed_plugins
from fd_core.simulation.planning.shapes import PlanJob, do_job
from fd_core.simulation.results.report import ReportedRun


class OutOfTime(Exception):
    """The time limit of a search is exceeded."""


class _Reply(msgspec.Struct):
    run: ReportedRun | None = None
    error: str = ""
    hint: str | None = None
    field: str | None = None
    plugin: bool = False


class PlanProcesses:
    """Runs jobs in several processes, or in this one if the count is one. Results are in the order of jobs."""

    def __init__(self, count: int, deadline: float) -> None:
        """`deadline`: on the clock of `time.monotonic`."""
        self._count = count
        self._deadline = deadline
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, jobs: Sequence[PlanJob], done: Callable[[], None]) -> list[ReportedRun]:
        """Return the result of each job, `done` called after each. Raises `OutOfTime`, `ConfigError`, `PluginError`."""
        if self._count == 1:
            return [self._here(job, done) for job in jobs]
        results: list[ReportedRun | None] = [None] * len(jobs)
        waiting = deque(range(len(jobs)))
        with selectors.DefaultSelector() as selector:
            # Each is in a separate group, since the parent handles Ctrl-C.
            command, pipe = [sys.executable, "-P", "-m", "fd_core.cli.planning.plan_processes"], subprocess.PIPE
            while len(self._processes) < min(self._count, len(jobs)):
                self._processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, process_group=0))
            for process in self._processes:
                selector.register(_pipe(process.stdout), selectors.EVENT_READ, [process, -1, bytearray()])
            for key in list(selector.get_map().values()):
                self._give(key.data, jobs, waiting)
            left = len(jobs)
            while left:
                ready = selector.select(max(self._deadline - time.monotonic(), 0))
                if not ready:
                    raise OutOfTime
                for key, _ in ready:
                    if (reply := _read(key.data)) is None:
                        continue
                    results[key.data[1]] = _result(reply)
                    left -= 1
                    done()
                    self._give(key.data, jobs, waiting)
        return [each for each in results if each is not None]

    def close(self) -> None:
        """End the processes, even if they are busy."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                _pipe(pipe).close()
        self._processes.clear()

    def _here(self, job: PlanJob, done: Callable[[], None]) -> ReportedRun:
        if time.monotonic() > self._deadline:
            raise OutOfTime
        # Through the same encoding as between processes, so that results are equal to the byte.
        result = msgspec.json.decode(msgspec.json.encode(do_job(job, installed_plugins())), type=ReportedRun)
        done()
        return result

    def _give(self, state: list[Any], jobs: Sequence[PlanJob], waiting: deque[int]) -> None:
        if not waiting:
            return
        state[1] = waiting.popleft()
        pipe = _pipe(state[0].stdin)
        try:
            pipe.write(msgspec.json.encode(jobs[state[1]]) + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise _died() from None


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise _died()
    return pipe


def _read(state: list[Any]) -> bytes | None:
    """Return a complete line; None if it has not fully arrived."""
    part = os.read(state[0].stdout.fileno(), 1 << 20)
    if not part:
        raise _died()
    state[2] += part
    if not part.endswith(b"\n"):
        return None
    line = bytes(state[2])
    state[2].clear()
    return line


def _result(line: bytes) -> ReportedRun:
    reply = msgspec.json.decode(line, type=_Reply)
    if reply.run is None:
        raise (PluginError if reply.plugin else ConfigError)(reply.error, field=reply.field, hint=reply.hint)
    return reply.run


def _died() -> ConfigError:
    return ConfigError(
        "a simulation process ended without a result", field="--jobs", hint="use fewer, or 1 to see its error"
    )


def _serve() -> None:
    replies = sys.stdout.buffer
    sys.stdout = sys.stderr  # a policy under study may print
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            jobs.put(line)
        os._exit(0)

    threading.Thread(target=read, name="fdcore-plan-jobs", daemon=True).start()
    while True:
        line = jobs.get()
        try:
            reply = _Reply(do_job(msgspec.json.decode(line, type=PlanJob), installed_plugins()))
        except Exception as caught:
            error = caught if isinstance(caught, FdError) else blamed_on_file(caught)
            if error is None:
                raise
            reply = _Reply(None, error.message, error.hint, field=error.field, plugin=isinstance(error, PluginError))
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()


if __name__ == "__main__":
    _serve()
