"""A process, as of another machine, that puts values into a store until it is killed."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.location import parse_location
from fd_core.testing.kit.processes import python
from fd_core.testing.kit.requirements import lacks

_SYSTEM_CALLS: Final = ("open", "os.", "fcntl.", "mmap.", "shutil.", "socket.", "sqlite3.")
"""Beginnings of the names of the events before which a writer stops."""
_MOST_STOPS: Final = 64
_PID: Final = os.getpid()


class WriterProcess:
    """The process, and lines that it prints after each put."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def wait_for_put(self) -> None:
        """Return after the next put. Raises `AssertionError` if the process ended."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the process that writes has ended"

    def stops(self) -> Iterator[None]:
        """Yield whenever the process has stopped itself, and let it go on, until it ends."""
        while os.WIFSTOPPED(status := os.waitpid(self._process.pid, os.WUNTRACED)[1]):
            yield
            self._process.send_signal(signal.SIGCONT)
        assert not status, f"the process that writes ended with status {status}"

    def wait(self) -> None:
        """Wait for the end of the process."""
        self._process.wait()

    def kill(self) -> None:
        """Kill the process, in the middle of a put."""
        self._process.kill()
        self.wait()


@contextmanager
def writer_process(cls: type[KVStore], location: str, main: str = "write") -> Iterator[WriterProcess]:
    """Start a process that writes to the location; skip the test if it cannot import the class."""
    if "<locals>" in cls.__qualname__:
        lacks("the class of the store is local to a function, and no other process can import it")
    process = python(f"from {__name__} import {main}; {main}()", text=True)
    assert process.stdin is not None
    with process:
        # Not as arguments: a location may hold a password.
        process.stdin.write(f"{cls.__module__}\n{cls.__qualname__}\n{location}\n")
        process.stdin.write(f"{os.getpid()} {threading.get_ident()} {threading.get_native_id()}\n")
        process.stdin.flush()
        try:
            yield WriterProcess(process)
        finally:
            process.kill()


def _store() -> KVStore:
    """Read a class, a location and ids from standard input, and become a process of another machine with these ids."""
    module, name, location, ids = (sys.stdin.readline().rstrip("\n") for _ in range(4))
    pid, thread, native = map(int, ids.split())
    os.getpid, threading.get_ident, threading.get_native_id = (lambda: pid), (lambda: thread), (lambda: native)
    vars(threading.main_thread()).update(_ident=thread)  # by which it ends
    started, now, now_ns = time.monotonic(), time.monotonic, time.monotonic_ns
    time.monotonic, time.monotonic_ns = (lambda: now() - started), (lambda: now_ns() - int(started * 1e9))
    store: KVStore = getattr(importlib.import_module(module), name)(parse_location(location))
    return store


def write_and_die() -> None:
    """Put a value, and another one until a file is renamed or linked for the last time: then this process is killed."""
    from fd_core.testing.stores.suite import LIMIT, TIMEOUT, key_of, value_of

    store, moves, last = _store(), itertools.count(1), 0

    def see(event: str, _: object) -> None:
        if event in ("os.rename", "os.link") and next(moves) == last:
            os.kill(_PID, signal.SIGKILL)

    sys.addaudithook(see)
    for number in range(2):
        store.put([(key_of(number), [value_of(key_of(number), LIMIT // 2)])], TIMEOUT)
        last = 2 * (next(moves) - 1) + 1  # of the next one, after the number that was just taken


def write_and_stop() -> None:
    """Put values, each of which stops this process once: before the first system call, then before the second etc."""
    from fd_core.testing.stores.suite import TIMEOUT, key_of, value_of

    store, calls, last = _store(), itertools.count(1), 0

    def see(event: str, _: object) -> None:
        if event.startswith(_SYSTEM_CALLS) and next(calls) == last:
            os.kill(_PID, signal.SIGSTOP)

    store.put([(key_of(0), [value_of(key_of(0))])], TIMEOUT)
    sys.addaudithook(see)
    for last in range(1, _MOST_STOPS):
        calls = itertools.count(1)
        store.put([(key_of(last), [value_of(key_of(last))])], TIMEOUT)
        if next(calls) <= last:
            return


def write() -> None:
    """Put values until this process is killed."""
    from fd_core.testing.stores.suite import TIMEOUT, key_of, versions_of

    store = _store()
    versions = {key: versions_of(key) for key in map(key_of, range(4))}
    for version in itertools.cycle(zip(*versions.values(), strict=True)):
        store.put([(key, [value]) for key, value in zip(versions, version, strict=True)], TIMEOUT)
        print("put", flush=True)
