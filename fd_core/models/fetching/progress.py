"""Progress of long work, so that a command can draw a bar and a server can log a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

__all__ = ["ProgressSink", "report_growth"]


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
