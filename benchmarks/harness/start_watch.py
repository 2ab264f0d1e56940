"""Watch a server start from outside: files mapped by its processes, its progress bars, and the answer of /ready."""

from __future__ import annotations

import contextlib
import http.client
import os
import pty
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .processes import EngineFailedError, end, end_with_parent

__all__ = ["Mark", "Start", "Waymarks", "children", "processor_seconds", "watched"]

_INTERVAL = 0.02
"""Seconds between two polls: a mark is late by at most this, and polling takes a small part of a core."""
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Waymarks:
    """Words that mark a stage of the start, each with the name of the stage."""

    server: Mapping[str, str] = field(default_factory=dict)
    """A part of the name of a file that the started process maps."""
    engine: Mapping[str, str] = field(default_factory=dict)
    """The same of a child process; `""` matches as soon as there is one."""
    terminal: Mapping[str, str] = field(default_factory=dict)
    """Words on the terminal."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Stage of a start: seconds since the command, and processor seconds spent until then."""

    name: str
    wall_s: float
    server_cpu_s: float
    engine_cpu_s: float
    """Of all processes below the server, ended ones included."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start; the last of its marks is the answer of /ready."""

    marks: tuple[Mark, ...]

    @property
    def ready(self) -> Mark:
        """The answer of /ready."""
        return self.marks[-1]


def watched(
    command: Sequence[str], port: int, waymarks: Waymarks, *, terminal: bool, ready_timeout: float = 300.0
) -> Start:
    """Start `command`, watch it until its /ready answers 200, and end it.

    Raises `EngineFailedError` if it ends before, or is not ready within `ready_timeout` seconds.
    """
    with _screen(terminal) as screen:
        begun = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=screen.inner,
            stderr=screen.inner,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            return _watch(process, port, waymarks, screen, begun, ready_timeout)
        finally:
            end(process)


def _watch(
    process: subprocess.Popen[bytes],
    port: int,
    waymarks: Waymarks,
    screen: _Screen,
    begun: float,
    ready_timeout: float,
) -> Start:
    wanted = [(waymarks.server, False), (waymarks.engine, True)]
    marks: list[Mark] = []
    met: set[str] = set()

    def mark(name: str) -> None:
        if name not in met:
            met.add(name)
            marks.append(Mark(name, time.perf_counter() - begun, *processor_seconds(process.pid)))

    while not _ready(port):
        if process.poll() is not None or time.perf_counter() - begun > ready_timeout:
            raise EngineFailedError(f"not ready (status {process.poll()}); its last words: {screen.read()[-2000:]}")
        for words, below in wanted:
            if not met.issuperset(words.values()):
                mapped = _mapped(children(process.pid) if below else [process.pid])
                for word, name in words.items():
                    if word in mapped:
                        mark(name)
        written = screen.read()
        for word, name in waymarks.terminal.items():
            if word in written:
                mark(name)
        time.sleep(_INTERVAL)
    mark("/ready answers")
    return Start(tuple(marks))


def processor_seconds(server: int) -> tuple[float, float]:
    """Return user and system seconds of a process, and of all that it started, ended ones included."""
    user, system, ended_user, ended_system = _times(server)
    below = sum(sum(_times(process)) for process in children(server))
    return (user + system) / _TICK, (ended_user + ended_system + below) / _TICK


def _times(process: int) -> tuple[int, int, int, int]:
    """Return ticks: user, system, and both of children that it has waited for; proc_pid_stat(5)."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0, 0, 0, 0
    user, system, ended_user, ended_system = map(int, words[11:15])
    return user, system, ended_user, ended_system


def children(process: int) -> list[int]:
    """Return the processes that it started and those that they started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *children(child)]
    return found


def _mapped(processes: Sequence[int]) -> str | tuple[()]:
    """Return the mapped files of the processes, empty if there are none."""
    texts = []
    for process in processes:
        with contextlib.suppress(OSError):
            texts.append(Path(f"/proc/{process}/maps").read_text())
    return "\n".join(texts) if texts else ()


def _ready(port: int) -> bool:
    """Send one request; a closed port refuses it at once."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _Screen:
    """Terminal of the command: `inner` is its end, `read` returns all it wrote."""

    def __init__(self, outer: int, inner: int) -> None:
        self.inner = inner
        self._outer = outer
        self._written = b""
        os.set_blocking(outer, False)

    def read(self) -> str:
        """Return all that was written so far."""
        with contextlib.suppress(OSError):
            while more := os.read(self._outer, 65536):
                self._written += more
        return self._written.decode(errors="replace")


@contextlib.contextmanager
def _screen(terminal: bool) -> Iterator[_Screen]:
    outer, inner = pty.openpty() if terminal else os.pipe()
    try:
        yield _Screen(outer, inner)
    finally:
        os.close(inner)
        os.close(outer)
