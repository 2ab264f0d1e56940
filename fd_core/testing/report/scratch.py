"""Temporary folders of runs; those that a killed run left are removed by the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_YOUNG: Final = 60.0
"""Seconds in which a folder may not be locked yet."""


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder, locked while its process lives, after removing unlocked ones of the same prefix."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _lock(left):  # it is in use, or belongs to another user
            if time.time() - left.stat().st_mtime > _YOUNG:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as name, _lock(Path(name)):
        yield Path(name)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)
