"""A process of this machine that belongs to this one: used by launchers on the node itself."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Final, cast

from fd_core.launching.child import child_command, child_socket
from fd_core.launching.contract import NODE_ADDRESS, ProcessSpec, how_ended

_LAST_LINES: Final = 10
_CHUNK: Final = 1 << 16
_LONGEST_LINE: Final = 1 << 20
"""Bytes from which on output without an end of a line, such as a progress bar, is a line."""
_FINAL_READS: Final = 16
"""Reads for the last lines of an ended process. A pipe holds one chunk; children of the process may write more."""
_BLOCKED_SECONDS: Final = 10.0
"""Timeout for forwarding a chunk, in seconds, which the reader of this process's own output may block."""


class OwnedProcess:
    """A running `ProcessSpec`; ends with this process, however that ends."""

    def __init__(
        self, spec: ProcessSpec, node: str, address: str, cores: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        """Start it on `cores`, all if there are none; `environment` selects its devices. Raises `OSError`."""
        self.name = spec.name
        self.node = node
        self.address = address
        variables = {**os.environ, **spec.environment, **spec.secrets, **environment}
        with child_socket() as (self._channel, theirs):
            self._process = subprocess.Popen(
                [_at(address, word) for word in child_command(cores, *spec.command)],
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={key: _at(address, value) for key, value in variables.items()},
                start_new_session=True,
            )
        self._channel.setblocking(False)  # the process announces itself on it
        self.pid = self._process.pid
        self._received = b""
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._unfinished = bytearray()
        """Line without an end, which stays one while children of the process have its output open."""
        self._output = cast(IO[bytes], self._process.stdout)
        self._reader = threading.Thread(target=self._forward, name=f"fdcore-{self.name}", daemon=True)
        self._reader.start()

    def announced(self) -> str | None:
        """Return its announced address, None until then."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._received += self._channel.recv(4096)
            line, end, _ = self._received.partition(b"\n")
            return line.decode(errors="replace") if end else None

    def exit_code(self) -> int | None:
        """Return None while it runs, then its exit code."""
        return self._process.poll()

    def reason(self) -> str:
        """Return how it ended and its last lines; empty while it runs."""
        code = self.exit_code()
        if code is None:
            return ""
        # The thread that reads may not have had a processor since the last line.
        locked = self._reading.acquire(timeout=_BLOCKED_SECONDS)
        try:
            for _ in range(_FINAL_READS if locked else 0):
                self._read()
            rest = [self._unfinished.decode(errors="replace")] if self._unfinished else []
            return "\n".join((how_ended(code), *tuple(self._lines), *rest))
        finally:
            if locked:
                self._reading.release()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def wait(self, seconds: float) -> int | None:
        """Wait for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def close(self) -> None:
        """End it at once, and wait for its end."""
        self.kill()
        self._process.wait()
        self._channel.close()

    def _forward(self) -> None:
        """Forward its output, and keep the end of it."""
        readable = select.poll()
        readable.register(self._output, select.POLLIN)
        ended = False
        while not ended:
            readable.poll()
            with self._reading:
                if ended := self._read():
                    self._output.close()

    def _read(self) -> bool:
        """Read once without blocking; return True at the end of the output."""
        if self._output.closed:
            return True
        os.set_blocking(self._output.fileno(), False)
        try:
            chunk = os.read(self._output.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        self._unfinished += chunk
        if b"\n" in chunk:
            *lines, rest = self._unfinished.split(b"\n")
            self._end_lines(lines, rest)
        elif self._unfinished and (not chunk or len(self._unfinished) > _LONGEST_LINE):
            self._end_lines([self._unfinished], bytearray())
        return not chunk

    def _end_lines(self, lines: Sequence[bytearray], rest: bytearray) -> None:
        for raw in lines:
            line = raw.decode(errors="replace")
            self._lines.append(line)
            with contextlib.suppress(OSError, ValueError):  # the reader has exited
                # A JSON log line stays unchanged.
                print(line if line.startswith("{") else f"{self.name} | {line}", file=sys.stderr, flush=True)
        self._unfinished = rest


def _at(address: str, word: str) -> str:
    return address if word == NODE_ADDRESS else word
