"""Processes that simulate plans for `fdcore plan`: one message for each job, one for each result.

Run as a module it is such a process, a child of `fd_core.launching.child`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import msgspec

from fd_core.errors import ConfigError, FdError, PluginError
from fd_core.launching.child import become_child, child_command, child_socket
from fd_core.launching.message_stream import MessageStream
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
        self._processes: dict[MessageStream, subprocess.Popen[bytes]] = {}

    def run(self, jobs: Sequence[PlanJob], done: Callable[[], None]) -> list[ReportedRun]:
        """Return the result of each job, `done` called after each. Raises `OutOfTime`, `ConfigError`, `PluginError`."""
        if self._count == 1:
            return [self._here(job, done) for job in jobs]
        while len(self._processes) < min(self._count, len(jobs)):
            with child_socket() as (own, theirs):
                command = child_command((), "-m", "fd_core.cli.planning.plan_processes")
                self._processes[MessageStream(own)] = subprocess.Popen(command, stdin=theirs)
        results: dict[int, ReportedRun] = {}
        waiting, idle, busy = deque(range(len(jobs))), list(self._processes), dict[MessageStream, int]()
        while len(results) < len(jobs):
            while waiting and idle:
                stream = idle.pop()
                busy[stream] = waiting.popleft()
                stream.send(msgspec.json.encode(jobs[busy[stream]]))
                stream.flush(wait=True)
            ready: list[Any] = wait(list[Any](busy), max(self._deadline - time.monotonic(), 0))
            if not ready:
                raise OutOfTime
            for stream in ready:
                for reply in stream.receive() or ():
                    results[busy.pop(stream)] = _result(reply)
                    idle.append(stream)
                    done()
                if stream.ended:
                    hint = "use fewer, or 1 to see its error"
                    raise ConfigError("a simulation process ended without a result", field="--jobs", hint=hint)
        return [results[number] for number in range(len(jobs))]

    def close(self) -> None:
        """End the processes, even if they are busy."""
        for stream, process in self._processes.items():
            process.kill()
            process.wait()
            stream.close()
        self._processes.clear()

    def _here(self, job: PlanJob, done: Callable[[], None]) -> ReportedRun:
        if time.monotonic() > self._deadline:
            raise OutOfTime
        # Through the same encoding as between processes, so that results are equal to the byte.
        result = msgspec.json.decode(msgspec.json.encode(do_job(job, installed_plugins())), type=ReportedRun)
        done()
        return result


def _result(reply: bytes) -> ReportedRun:
    read = msgspec.json.decode(reply, type=_Reply)
    if read.run is None:
        raise (PluginError if read.plugin else ConfigError)(read.error, field=read.field, hint=read.hint)
    return read.run


def _serve() -> None:
    become_child()
    parent = MessageStream.to_parent()
    sys.stdout = sys.stderr  # a policy under study may print
    for job in parent:
        try:
            reply = _Reply(do_job(msgspec.json.decode(job, type=PlanJob), installed_plugins()))
        except Exception as caught:
            error = caught if isinstance(caught, FdError) else blamed_on_file(caught)
            if error is None:
                raise
            reply = _Reply(None, error.message, error.hint, field=error.field, plugin=isinstance(error, PluginError))
        parent.send(msgspec.json.encode(reply))
        parent.flush(wait=True)


if __name__ == "__main__":
    _serve()
