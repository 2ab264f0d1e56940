"""Resources of processes, and a runner of the kits and the doctor, which reads events as lines of JSON."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

LIMITS: Final = {"descriptors": (resource.RLIMIT_NOFILE, 32), "sizes of files": (resource.RLIMIT_FSIZE, 1 << 18)}
"""Limits of a process that a server may reach; polling may name some descriptors, whatever the limit of new ones."""


def python(code: str, *, text: bool = False, **variables: str) -> subprocess.Popen[Any]:
    """Start an interpreter that runs `code`, with the import path of this process and pipes to it."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    command, pipe = [sys.executable, "-P", "-c", code], subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=text)


class ResourceSnapshot(NamedTuple):
    """Resources of a process, sampled before and after a case to find leaks."""

    descriptors: list[str]
    mapped: list[str]
    """Names of shared memory and files."""
    threads: list[str]
    processes: list[str]


def resource_snapshot() -> ResourceSnapshot:
    """Return the resources of this process; descriptors and mappings only if /proc exists."""
    gc.collect()
    threads = sorted(thread.name for thread in threading.enumerate())
    own = Path("/proc/self")
    if not own.exists():
        return ResourceSnapshot([], [], threads, [])
    descriptors = []
    for entry in os.listdir(own / "fd"):  # noqa: PTH208 - a `Path` interns its parts, which counts as memory
        with suppress(OSError):  # the descriptor of the listing itself
            descriptors.append(os.readlink(f"/proc/self/fd/{entry}"))  # noqa: PTH115
    lines = [line.split(maxsplit=5) for line in (own / "maps").read_text().splitlines()]
    mapped = [line[5] for line in lines if len(line) == 6 and "s" in line[1]]
    return ResourceSnapshot(sorted(descriptors), sorted(mapped), threads, sorted(_children()))


def listening_ports() -> Iterator[int]:
    """Yield the TCP ports on which this process listens."""
    own = resource_snapshot().descriptors
    for path in Path("/proc/self/net").glob("tcp*"):
        for _, address, _, state, *_, inode in (line.split()[:10] for line in path.read_text().splitlines()[1:]):
            if state == "0A" and f"socket:[{inode}]" in own:
                yield int(address.rpartition(":")[2], 16)


def _children() -> Iterator[str]:
    """Yield the ids of the processes that this one started and that it has not waited for."""
    for number in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208
        with suppress(OSError), open(f"/proc/{number}/stat", errors="replace") as status:  # noqa: PTH123 - it has ended
            if status.read().rpartition(")")[2].split()[1] == str(os.getpid()):
                yield number


@contextmanager
def at_a_limit(of: str, most: int | None = None) -> Iterator[None]:
    """Let this process open nothing more, or write no larger files, of which a write to the limit is a short one.

    With files of at most 0 bytes none can be written, as on a full disk.
    """
    kind, usual = LIMITS[of]
    before, taken = resource.getrlimit(kind), list[int]()
    resource.setrlimit(kind, (usual if most is None else most, before[1]))
    try:
        with suppress(OSError):
            while kind == resource.RLIMIT_NOFILE:  # also the numbers between those in use
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(kind, before)


class RunEnd(NamedTuple):
    """Outcome of a process."""

    code: int
    """Its exit status, negative for a signal."""
    silent: bool
    """True if it was killed because it wrote no event within the timeout."""


@contextmanager
def _exits_on_termination() -> Iterator[None]:
    """Turn SIGTERM into `SystemExit`, so that the processes of a run end with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def follow(
    command: Sequence[str],
    path: Path,
    kind: Any,
    most_quiet_seconds: float,
    *,
    output: Path,
    stdin: int,
    env: Mapping[str, str],
) -> Iterator[Any]:
    """Run a command and yield the events, of type `kind`, that it writes to `path`; a truncated line is skipped.

    The last event is `RunEnd`. Its output is appended to `output`. It is killed, with its children, after `patience`
    seconds without an event, when the generator is closed, and on SIGTERM.
    """
    path.touch()
    with (
        _exits_on_termination(),
        output.open("ab") as printed,
        path.open("rb") as file,
        subprocess.Popen(
            command, stdin=stdin, stdout=printed, stderr=printed, env=env, start_new_session=True
        ) as process,
    ):
        changed, rest, silent = time.monotonic(), b"", False
        try:
            while not silent:
                over = process.poll() is not None
                if new := file.read():
                    changed = time.monotonic()
                    *lines, rest = (rest + new).split(b"\n")
                    for line in lines:
                        yield msgspec.json.decode(line, type=kind)
                elif over:
                    break
                elif time.monotonic() - changed > most_quiet_seconds:
                    silent = True
                else:
                    time.sleep(0.05)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    yield RunEnd(process.returncode, silent)
