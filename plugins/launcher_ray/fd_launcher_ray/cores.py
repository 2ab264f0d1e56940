"""Assignment of a node's processors: Ray counts them, but assigns no particular ones."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)


class TakenCores:
    """Processors that no other process of this user takes, as long as this object lives; it holds a lock for each."""

    def __init__(self, count: int) -> None:
        """Take `count` of them, or none if fewer are free, as where nodes share a machine."""
        folder = Path(tempfile.gettempdir()) / f"fdcore-cores-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self.numbers: list[int] = []
        self._locks: list[IO[str]] = []
        for core in sorted(os.sched_getaffinity(0)):
            if len(self.numbers) == count:
                return
            lock = (folder / str(core)).open("a")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            self.numbers.append(core)
            self._locks.append(lock)
        if len(self.numbers) < count:
            _log.warning("%d processors are asked for and %d are free: not pinned", count, len(self.numbers))
            self.close()

    def close(self) -> None:
        """Give them back."""
        self.numbers = []
        for lock in self._locks:
            lock.close()
        self._locks = []
