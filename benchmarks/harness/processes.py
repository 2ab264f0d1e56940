"""A process in a peer's environment that is no engine: spoken to in JSON lines, ended with all its children."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .sessions import ANSWER_SECONDS, EngineFailedError
from .sessions import _end as end

__all__ = ["EngineFailedError", "Worker"]


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
            )

    def ask(self, **message: object) -> dict[str, Any]:
        """Send one message and return the reply; raise EngineFailedError where it fails or never comes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = threading.Timer(ANSWER_SECONDS, end, (self._process,))
        deadline.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
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
