"""Assignment of a node's CPUs, which Ray counts but does not pin."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)


class ReservedCores:
    """CPUs reserved against other processes of this user by one file lock each."""

    def __init__(self, count: int) -> None:
        """Reserve `count` CPUs, or none if fewer are free, for example if nodes share a machine."""
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
            _log.warning("requested %d CPUs, but %d are free: not pinned", count, len(self.numbers))
            self.close()

    def close(self) -> None:
        """Release the CPUs."""
        self.numbers = []
        for lock in self._locks:
            lock.close()
        self._locks = []
