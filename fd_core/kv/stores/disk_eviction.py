"""How a disk store keeps to its limit while several engines write into one folder.

The file `usage` holds the space that all values take, finished or being written, and its lock is held while that
changes. Space is reserved before a value is written: the reservation is the file in `partial`, made under the lock with
the value's space in its name. So a count of the folder under the lock counts everything, and what a killed engine
leaves behind makes the number too large, never too small. When space runs out, everything is counted afresh and the
least recently used values are deleted, whichever engine wrote them. Space runs out at the limit, or earlier where the
file system does.
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
from fd_core.kv.stores.disk_folder import (
    PARTIAL,
    FoundFile,
    Room,
    found_partials,
    found_values,
    inside,
    room_in,
    space_for,
)

DEFAULT_BYTES: Final = 10 << 30
SHARE_OF_FREE: Final = 0.5
"""Share of the disk, files of others left out, that a store without a limit from the user may take."""

_USAGE: Final = "usage"
_KEPT_SHARE: Final = 7 / 8
"""Share of the limit that eviction leaves in use; the rest is free until everything is counted again."""
_SPARE_BLOCKS: Final = 2
"""Blocks that stay free for the folders of values."""
_STALE_SECONDS: Final = 900.0
"""A reservation as old as this belongs to a writer that died."""
_NEXT_TRY_SECONDS: Final = 0.001
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class DiskEviction:
    """The limit of one folder, as one engine sees it."""

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        self.path = path
        self._limit = limit_bytes
        self.counted = False
        """Whether this engine counted the folder: what others recorded may be wrong."""

    @contextlib.contextmanager
    def reservations(self, root: int, deadline: Deadline) -> Iterator[DiskReservations]:
        """Give the reservations of one call that writes to or deletes from the opened folder `root`."""
        with contextlib.ExitStack() as stack:
            usage = os.open(_USAGE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=root)
            stack.callback(os.close, usage)
            partial = stack.enter_context(inside(root, PARTIAL, create=True))
            yield DiskReservations(self, root, partial, usage, deadline)

    def stats(self, root: int, deadline: Deadline) -> StoreStats:
        """Count all values."""
        values = list(found_values(root, deadline))
        return StoreStats(len(values), sum(value.space for value in values), self.limit_bytes(root, deadline))

    def limit_bytes(self, root: int, deadline: Deadline) -> int:
        """Return the limit in bytes, derived from the free space if the user gave none."""
        if self._limit is None:
            free = shutil.disk_usage(root).free + sum(value.space for value in found_values(root, deadline))
            self._limit = min(DEFAULT_BYTES, int(free * SHARE_OF_FREE))
        return self._limit


class DiskReservations:
    """Space that one call of the store reserves and gives back."""

    def __init__(self, eviction: DiskEviction, root: int, partial: int, usage: int, deadline: Deadline) -> None:
        self.root = root
        self.partial = partial
        """Descriptor of the folder that holds the reservations."""
        self.deadline = deadline
        self.shown = eviction.path
        self._eviction = eviction
        self._usage = usage

    def reserve(self, size: int) -> tuple[str, int, int] | None:
        """Make the file in `partial` for a value of `size` bytes; return name, open descriptor and space of it.

        Returns None for a value larger than the limit. Raises `StoreError(Trouble.FULL, ...)` if other engines, or
        files that are not ours, take what the value needs.
        """
        with self._locked():
            limit = self._eviction.limit_bytes(self.root, self.deadline)
            room = room_in(self.root)
            space = space_for(size, room.block)
            if space > limit:
                return None
            used = self._recorded()
            # Writing takes blocks for folders as well.
            short = room.free < space + _SPARE_BLOCKS * room.block or room.full_of_files
            if used is None or not self._eviction.counted or used + space > limit or short:
                used = _evict(self, space, limit, room)
                self._eviction.counted = True
            if used + space > limit:
                raise StoreError(Trouble.FULL, f"other engines fill the KV store in {self._eviction.path}")
            name = f"{space}-{secrets.token_hex(16)}"
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.partial)
            self._record(used + space)
            return name, file, space

    def give_back(self, space: int) -> None:
        """Record that so many bytes of space came free, unless the deadline has passed: the next count finds out."""
        if not space:
            return
        with contextlib.suppress(StoreError), self._locked():
            used = self._recorded()
            if used is not None:
                self._record(max(0, used - space))

    def _recorded(self) -> int | None:
        """Return the bytes in use as recorded last, None if the record is not legible."""
        text = os.pread(self._usage, 32, 0)
        return int(text) if text.isdigit() else None

    def _record(self, used: int) -> None:
        # Always of one length, so that no digit of a longer number stays behind.
        os.pwrite(self._usage, b"%020d" % used, 0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. On a file system without locks nothing is held, and each engine keeps to the limit alone."""
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


def _evict(reservations: DiskReservations, space: int, limit: int, room: Room) -> int:
    """Delete the least recently used values until `space` more fits; return the space in use.

    Raises `StoreError(Trouble.FULL, ...)`, and deletes nothing, where that would not be enough.
    """
    root, deadline = reservations.root, reservations.deadline
    # Reservations first: a value that is finished meanwhile is counted twice rather than not at all.
    writing = [found for found in found_partials(root) if not _removed_stale(reservations.partial, found)]
    values = sorted(found_values(root, deadline))
    used = sum(found.space for found in (*writing, *values))
    given = used + room.free - _SPARE_BLOCKS * room.block
    if room.full_of_files:
        given = min(given, used)
    if sum(found.space for found in writing) + space > given:
        raise StoreError(Trouble.FULL, f"No space left on the disk of the KV store in {reservations.shown}")
    limit = min(limit, given)
    if used + space <= limit:
        return used
    for value in values:
        if used + space <= limit * _KEPT_SHARE or (not deadline.left and used + space <= limit):
            break
        deadline.check()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), inside(root, value.folder) as folder:
            os.unlink(value.name, dir_fd=folder)
        used -= value.space
    return used


def _removed_stale(partial: int, found: FoundFile) -> bool:
    if time.time() - found.used_ns / 1e9 < _STALE_SECONDS:
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(found.name, dir_fd=partial)
    return True
