"""Fault injection for file changes below one folder: a disk that fails, or a process that dies, at a chosen call."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any
from unittest import mock


class Killed(BaseException):
    """The process died; nothing after it reaches the disk."""


class FaultyDisk:
    """Counts the calls that change files. From `first` on, `count` calls fail with `error`; None kills the process.

    A failing write has written the first half of its bytes.
    """

    def __init__(
        self, folder: Path, first: int | None = None, count: int = 1, error: int | None = errno.ENOSPC
    ) -> None:
        self.folder = str(folder)
        self.calls = 0
        self.killed = False
        self._faulty = range(0) if first is None else range(first, first + count)
        self._error = error

    @property
    def sound(self) -> bool:
        """Return True if no call fails."""
        return not self._faulty

    def call(self, path: object) -> OSError | None:
        """Count a call and return its injected error, if any. Raises `Killed`."""
        if self.killed:
            raise Killed
        if not str(path).startswith(self.folder):
            return None
        self.calls += 1
        if self.calls - 1 not in self._faulty:
            return None
        if self._error is None:
            self.killed = True
            return OSError("killed")
        return OSError(self._error, os.strerror(self._error))

    def check(self, path: object) -> None:
        """Count a call and raise its injected error, if any."""
        if (error := self.call(path)) is not None:
            raise Killed if self.killed else error

    @contextmanager
    def installed(self) -> Iterator[FaultyDisk]:
        """Patch every call of this process that changes files."""
        real_open, real_fsync = Path.open, os.fsync
        real = {name: getattr(os, name) for name in ("replace", "unlink")}

        def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            if mode == "rb" or not str(path).startswith(self.folder):
                return real_open(path, mode, *args, **options)
            self.check(path)
            return _FaultyFile(self, path, real_open(path, mode, buffering=0))

        def changed(name: str) -> Any:
            def call(path: Any, *args: Any, **options: Any) -> Any:
                self.check(path)
                return real[name](path, *args, **options)

            return call

        def fsync(descriptor: int) -> None:
            self.check(self.folder)
            real_fsync(descriptor)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(Path, "open", opened))
            stack.enter_context(mock.patch.object(os, "fsync", fsync))
            for name in real:
                stack.enter_context(mock.patch.object(os, name, changed(name)))
            yield self


class _FaultyFile:
    def __init__(self, disk: FaultyDisk, path: Path, file: IO[bytes]) -> None:
        self._disk = disk
        self._path = path
        self._file = file

    def write(self, data: bytes) -> int:
        if (error := self._disk.call(self._path)) is not None:
            self._file.write(bytes(data)[: len(data) // 2])
            raise Killed if self._disk.killed else error
        return self._file.write(data)

    def truncate(self, size: int) -> int:
        self._disk.check(self._path)
        return self._file.truncate(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file)

    def __enter__(self) -> _FaultyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
