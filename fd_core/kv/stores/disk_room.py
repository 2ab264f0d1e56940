"""How a disk store keeps to its limit while several engines write into one folder.

The file `usage` holds the bytes of all values and of all that is being written, and its lock is held while it changes.
Room is reserved before a value is written: the reservation is the file in `partial`, made under the lock with its
final size in its name. So whoever counts the folder under the lock counts everything, and what a killed engine leaves
behind makes the number too large, never too small. When there is no room, everything is counted afresh and what was not
used for longest is deleted, whoever wrote it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fd_core.kv.stores.contract import Deadline, StoreError, StoreStats, Trouble
from fd_core.kv.stores.disk_folder import PARTIAL, FoundFile, found_partials, found_values, inside

__all__ = ["DEFAULT_BYTES", "SHARE_OF_FREE", "Room"]

DEFAULT_BYTES: Final = 10 << 30
SHARE_OF_FREE: Final = 0.5
"""Without a limit from the user, at most this share of what the disk has besides other people's files."""

_USAGE: Final = "usage"
_KEPT_SHARE: Final = 7 / 8
"""What stays when old values are deleted; the rest is room until all is counted again."""
_STALE_SECONDS: Final = 900.0
"""A value that has been written for so long is one whose writer died."""
_NEXT_TRY_SECONDS: Final = 0.001


class Room:
    """The limit of one folder, as one engine sees it."""

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        self._path = path
        self._chosen = limit_bytes
        self._limit: int | None = limit_bytes
        self._counted = False

    def reserve(self, root: int, size: int, deadline: Deadline) -> str | None:
        """Make the file in `partial` for a value of `size` bytes and return its name; None if it can never fit.

        Raises `StoreError(Trouble.FULL, ...)` if it does not fit beside what is being written.
        """
        with self._locked(root, deadline) as usage:
            limit = self._limit_bytes(root, deadline)
            if size > limit:
                return None
            used = _read(usage)
            if used is None or not self._counted or used + size > limit:
                used = self._make_room(root, size, limit, deadline)
                self._counted = True
            if used + size > limit:
                raise StoreError(Trouble.FULL, f"other engines fill the KV store in {self._path}")
            name = f"{size}-{secrets.token_hex(16)}"
            with inside(root, PARTIAL, create=True) as partial:
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=partial))
            _write(usage, used + size)
            return name

    def give_back(self, root: int, size: int, deadline: Deadline) -> None:
        """Say that `size` bytes are gone. If there is no time for it, it is left to the next count."""
        if not size:
            return
        with contextlib.suppress(StoreError), self._locked(root, deadline) as usage:
            used = _read(usage)
            if used is not None:
                _write(usage, max(0, used - size))

    def stats(self, root: int, deadline: Deadline) -> StoreStats:
        """Count everything."""
        values = list(_checked(root, deadline))
        return StoreStats(len(values), sum(value.size for value in values), self._limit_bytes(root, deadline))

    def _limit_bytes(self, root: int, deadline: Deadline) -> int:
        if self._limit is None:
            free = shutil.disk_usage(root).free + sum(value.size for value in _checked(root, deadline))
            self._limit = min(DEFAULT_BYTES, int(free * SHARE_OF_FREE))
        return self._limit

    def _make_room(self, root: int, size: int, limit: int, deadline: Deadline) -> int:
        """Delete old values until `size` more bytes fit; return how many bytes are used."""
        # First what is being written: what moves to its place meanwhile is counted twice rather than not at all.
        writing = [found for found in found_partials(root) if not _removed_stale(root, found)]
        values = sorted(_checked(root, deadline))
        used = sum(found.size for found in (*writing, *values))
        if used + size <= limit:
            return used
        for value in values:
            if used + size <= limit * _KEPT_SHARE or (not deadline.left and used + size <= limit):
                break
            deadline.check()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), inside(root, value.folder) as folder:
                os.unlink(value.name, dir_fd=folder)
            used -= value.size
        return used

    @contextlib.contextmanager
    def _locked(self, root: int, deadline: Deadline) -> Iterator[int]:
        usage = os.open(_USAGE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=root)
        try:
            while True:
                try:
                    fcntl.flock(usage, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    deadline.check()
                    time.sleep(_NEXT_TRY_SECONDS)
            yield usage
        finally:
            os.close(usage)  # which ends the lock


def _checked(root: int, deadline: Deadline) -> Iterator[FoundFile]:
    for value in found_values(root):
        if value is None:
            deadline.check()
        else:
            yield value


def _removed_stale(root: int, partial: FoundFile) -> bool:
    if time.time() - partial.used_ns / 1e9 < _STALE_SECONDS:
        return False
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), inside(root, PARTIAL) as folder:
        os.unlink(partial.name, dir_fd=folder)
    return True


def _read(usage: int) -> int | None:
    text = os.pread(usage, 32, 0)
    return int(text) if text.isdigit() else None


def _write(usage: int, used: int) -> None:
    # Always as long, so that no rest of a longer number stays.
    os.pwrite(usage, b"%020d" % used, 0)
