"""How a disk store keeps to its limit while several engines write into one folder.

The file `usage` holds the bytes of all values and of all that is being written, and its lock is held while it changes.
Room is reserved before a value is written: the reservation is the file in `partial`, made under the lock with its
final size in its name. So whoever counts the folder under the lock counts everything, and what a killed engine leaves
behind makes the number too large, never too small. When there is no room, everything is counted afresh and what was not
used for longest is deleted, whoever wrote it.
"""

from __future__ import annotations

import contextlib
import errno
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

__all__ = ["DEFAULT_BYTES", "SHARE_OF_FREE", "Ledger", "Room"]

DEFAULT_BYTES: Final = 10 << 30
SHARE_OF_FREE: Final = 0.5
"""Without a limit from the user, at most this share of what the disk has besides other people's files."""

_USAGE: Final = "usage"
_KEPT_SHARE: Final = 7 / 8
"""What stays when old values are deleted; the rest is room until all is counted again."""
_STALE_SECONDS: Final = 900.0
"""A value that has been written for so long is one whose writer died."""
_NEXT_TRY_SECONDS: Final = 0.001
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Room:
    """The limit of one folder, as one engine sees it."""

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        self._path = path
        self._limit = limit_bytes
        self._counted = False

    @contextlib.contextmanager
    def entered(self, root: int, deadline: Deadline) -> Iterator[Ledger]:
        """Give what a batch of changes to the opened folder `root` needs."""
        with contextlib.ExitStack() as stack:
            usage = os.open(_USAGE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=root)
            stack.callback(os.close, usage)
            yield Ledger(self, root, stack.enter_context(inside(root, PARTIAL, create=True)), usage, deadline)

    def stats(self, root: int, deadline: Deadline) -> StoreStats:
        """Count everything."""
        values = list(_checked(root, deadline))
        return StoreStats(len(values), sum(value.size for value in values), self.limit_bytes(root, deadline))

    def limit_bytes(self, root: int, deadline: Deadline) -> int:
        """Return the limit, from the free space if the user gave none."""
        if self._limit is None:
            free = shutil.disk_usage(root).free + sum(value.size for value in _checked(root, deadline))
            self._limit = min(DEFAULT_BYTES, int(free * SHARE_OF_FREE))
        return self._limit

    def used_after_making(self, ledger: Ledger, size: int, limit: int) -> int:
        """Count, if there is need to, and delete old values until `size` more bytes fit; return the bytes in use."""
        used = ledger.recorded()
        if used is None or not self._counted or used + size > limit:
            used = _make_room(ledger, size, limit)
            self._counted = True
        if used + size > limit:
            raise StoreError(Trouble.FULL, f"other engines fill the KV store in {self._path}")
        return used


class Ledger:
    """One batch of reservations."""

    def __init__(self, room: Room, root: int, partial: int, usage: int, deadline: Deadline) -> None:
        self.root = root
        self.partial = partial
        """Descriptor of the folder of reservations."""
        self.deadline = deadline
        self._room = room
        self._usage = usage

    def reserve(self, size: int) -> tuple[str, int] | None:
        """Make the file in `partial` for a value of `size` bytes; return its name and an open descriptor of it.

        None if it could never fit. Raises `StoreError(Trouble.FULL, ...)` if it does not fit beside what others are
        writing.
        """
        with self._locked():
            limit = self._room.limit_bytes(self.root, self.deadline)
            if size > limit:
                return None
            used = self._room.used_after_making(self, size, limit)
            name = f"{size}-{secrets.token_hex(16)}"
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.partial)
            self._record(used + size)
            return name, file

    def give_back(self, size: int) -> None:
        """Say that `size` bytes are gone. If there is no time for it, it is left to the next count."""
        if not size:
            return
        with contextlib.suppress(StoreError), self._locked():
            used = self.recorded()
            if used is not None:
                self._record(max(0, used - size))

    def recorded(self) -> int | None:
        """Return the bytes in use as last written down, None if that is not legible."""
        text = os.pread(self._usage, 32, 0)
        return int(text) if text.isdigit() else None

    def _record(self, used: int) -> None:
        # Always as long, so that no rest of a longer number stays.
        os.pwrite(self._usage, b"%020d" % used, 0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. On a file system without locks nothing is held: there the limit is one of each engine."""
        while True:
            try:
                fcntl.flock(self._usage, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                self.deadline.check()
                time.sleep(_NEXT_TRY_SECONDS)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                yield
                return
        try:
            yield
        finally:
            fcntl.flock(self._usage, fcntl.LOCK_UN)


def _make_room(ledger: Ledger, size: int, limit: int) -> int:
    """Delete old values until `size` more bytes fit; return how many bytes are used."""
    # First what is being written: what moves to its place meanwhile is counted twice rather than not at all.
    writing = [found for found in found_partials(ledger.root) if not _removed_stale(ledger.partial, found)]
    values = sorted(_checked(ledger.root, ledger.deadline))
    used = sum(found.size for found in (*writing, *values))
    if used + size <= limit:
        return used
    for value in values:
        if used + size <= limit * _KEPT_SHARE or (not ledger.deadline.left and used + size <= limit):
            break
        ledger.deadline.check()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), inside(ledger.root, value.folder) as folder:
            os.unlink(value.name, dir_fd=folder)
        used -= value.size
    return used


def _checked(root: int, deadline: Deadline) -> Iterator[FoundFile]:
    for value in found_values(root):
        if value is None:
            deadline.check()
        else:
            yield value


def _removed_stale(partial: int, found: FoundFile) -> bool:
    if time.time() - found.used_ns / 1e9 < _STALE_SECONDS:
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(found.name, dir_fd=partial)
    return True
