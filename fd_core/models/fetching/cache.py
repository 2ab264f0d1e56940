"""The cache folder: how two processes share it."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fd_core.errors import ModelError


class ProgressSink:
    """Receives the progress of one task at a time: `start`, any number of `advance`, `finish`.

    The base class shows nothing.
    """

    def start(self, description: str, total_bytes: int | None) -> None:
        """Begin a task; `total_bytes` is None where it is not known."""

    def advance(self, count: int) -> None:
        """Count `count` more bytes."""

    def finish(self) -> None:
        """End the task, whether it succeeded or not."""


def report_growth(folder: Path, sink: ProgressSink, wait: Callable[[float], bool]) -> None:
    """Report the bytes that appear in a folder as progress until `wait(seconds)` says that the work has ended.

    For work done by others, such as a package installer, that says nothing of its progress.
    """
    seen = 0
    ended = False
    while not ended:
        ended = wait(0.1)
        size = _size(folder)
        if size > seen:
            sink.advance(size - seen)
            seen = size


def _size(folder: Path) -> int:
    total = 0
    for entry in folder.rglob("*"):
        try:
            total += entry.lstat().st_size if not entry.is_dir() else 0
        except OSError:  # it was renamed or removed while we looked
            continue
    return total


_PARTIAL = ".partial-"


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; others that ask for it wait. Creates the folder.

    The lock ends with the process that holds it, however it ends. Where the system has no file locks nothing is
    held: what is put into place by a rename stays whole, at worst it is downloaded twice.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("wb")
    except OSError as error:
        raise _unwritable(folder, error) from error
    with lock:  # closing the file releases the lock
        _lock(lock.fileno())
        yield


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Give a folder for unfinished work on the same file system; it is removed at the end.

    What processes that were killed left behind is removed first, so call it while holding `exclusive`.
    """
    for left_over in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    try:
        work = tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    with work as name:
        yield Path(name)


def require_room(folder: Path, needed: int, what: str, setting: str) -> None:
    """Raise `ModelError` that names `setting` unless the disk of `folder` has `needed` bytes left.

    The folder need not exist yet.
    """
    there = next((each for each in (folder, *folder.parents) if each.exists()), None)
    if there is None:
        return
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ModelError(
            f"{what} needs {needed / 1e6:,.0f} MB in {folder}, whose disk has {free / 1e6:,.0f} MB left",
            field=setting,
            hint=f"remove files there, or set {setting} to a folder on another disk",
        )


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unwritable(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"cannot write to the cache {folder}: {error.strerror or error}",
        field="FD_CACHE",
        hint="set FD_CACHE to a folder that you may write to, on a disk that is not full",
    )
