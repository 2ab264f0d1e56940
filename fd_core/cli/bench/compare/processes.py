"""A process in a peer's environment, spoken to in JSON lines, ended with all its children."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

__all__ = ["ANSWER_SECONDS", "EngineFailedError", "Worker", "end", "end_with_parent", "interrupted_by_sigterm"]

ANSWER_SECONDS = 900
"""Timeout for an engine to load or to finish one run; it is then terminated and left out."""


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""


class EngineFailedError(Exception):
    """An engine could not be started or failed during a run; the message has the cause."""


class Worker:
    """A process that answers each line with one line; its standard error goes to `log`."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | variables,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self._requests, self._replies = cast(TextIO, self._process.stdin), cast(TextIO, self._process.stdout)

    def ask(self, **message: object) -> dict[str, Any]:
        """Send one message and return the reply; raise EngineFailedError on a failure or a timeout."""
        deadline = threading.Timer(ANSWER_SECONDS, end, (self._process,))
        deadline.start()
        try:
            self._requests.write(json.dumps(message) + "\n")
            self._requests.flush()
            line = self._replies.readline()
        except BrokenPipeError:
            line = ""
        finally:
            deadline.cancel()
        if not line:
            raise EngineFailedError(f"its process ended with status {self._process.wait()}; see {self._log}")
        reply: dict[str, Any] = json.loads(line)
        if not reply["ok"]:
            raise EngineFailedError(f"{reply['error']}; see {self._log}")
        return reply

    def close(self) -> None:
        """End the process and its children."""
        end(self._process)


def end(process: subprocess.Popen[Any]) -> None:
    """End the process and the children that it started (they share its process group)."""
    for how, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        if process.poll() is not None:
            break
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"process {process.pid} did not end within {seconds} s", file=sys.stderr)


def interrupted_by_sigterm() -> None:
    """Handle the first SIGTERM like Ctrl-C, so that this process ends its children: `timeout` sends two."""

    def interrupt(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def end_with_parent() -> None:
    """Have the kernel send this process, a child before its exec, SIGTERM when its parent ends for any reason."""
    if _LIBC is not None:
        _LIBC.prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
