"""A store in a folder: survives restarts and kills, keeps to a limit, shared by the engines of one machine.

A value appears in one step, by a rename. Nothing is forced to the disk: after a power cut a file may be torn, which the
envelope detects. The deadline is checked between values; a call into the kernel that hangs, such as on a network
file system that went away, cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

from fd_core.config.paths import user_path
from fd_core.config.sizes import format_size
from fd_core.errors import ConfigError
from fd_core.kv.stores.contract import Bytes, Deadline, KVStore, StoreError, StoreStats, Trouble
from fd_core.kv.stores.disk_folder import (
    DiskEviction,
    DiskReservations,
    inside,
    opened,
    room_in,
    size_of_value,
    space_of_value,
    value_name,
)
from fd_core.kv.stores.location import StoreLocation

_MAX_PARTS: Final = 1024
"""Buffers that the system takes in one call."""

_TROUBLES: Final = {
    errno.ENOSPC: Trouble.FULL,
    errno.EDQUOT: Trouble.FULL,
    errno.EFBIG: Trouble.FULL,
    errno.EROFS: Trouble.READ_ONLY,
    errno.EACCES: Trouble.DENIED,
    errno.EPERM: Trouble.DENIED,
    errno.ENOENT: Trouble.UNREACHABLE,
    errno.ENODEV: Trouble.UNREACHABLE,
    errno.ENXIO: Trouble.UNREACHABLE,
    errno.EIO: Trouble.UNREACHABLE,
    errno.ESTALE: Trouble.UNREACHABLE,
    errno.ENOTCONN: Trouble.UNREACHABLE,
    errno.EHOSTDOWN: Trouble.UNREACHABLE,
    errno.ETIMEDOUT: Trouble.TIMEOUT,
    errno.ELOOP: Trouble.MALFORMED,
    errno.ENOTDIR: Trouble.MALFORMED,
    errno.EISDIR: Trouble.MALFORMED,
}


class DiskStore(KVStore):
    """`disk:FOLDER` with `max_bytes`; the least recently used values are deleted first.

    The limit is for what the file system takes for the values, in whole blocks; folders, up to 1 MiB, come on top.
    Where the file system has less, or others fill it, less is used. Without `max_bytes` the limit is 10 GiB, but at
    most half of what the disk has free or the store already uses. The folder and the files in it are for their owner
    only, so engines that share the folder run as one user.
    """

    name = "disk"

    def __init__(self, location: StoreLocation) -> None:
        super().__init__(location)
        location.require_known("max_bytes")
        if not location.rest or "\0" in location.rest:
            raise ConfigError(f"{location.shown} names no folder", field="--kv-store", hint="write disk:FOLDER")
        self.path = user_path(location.rest, "--kv-store")
        self._eviction = DiskEviction(self.path, location.size("max_bytes"))
        self._closed = False

    def open(self, timeout: float) -> str:
        """Make the folder, reserve a file in it, and return how full the store is."""
        deadline = Deadline(timeout)
        with self._reported(), opened(self.path, create=True) as root:
            with self._eviction.reservations(root, deadline) as reservations:
                reserved = reservations.reserve(0)
                if reserved:
                    _abandon(reservations, *reserved)
            full = self._eviction.stats(root, deadline)
        return (
            f"disk {self.path}, {format_size(full.bytes or 0)} of at most {format_size(full.limit_bytes or 0)} in "
            f"{full.values:,} values"
        )

    def get(self, keys: Sequence[bytes], limit: int, timeout: float) -> list[Bytes | None]:
        """Read each file into memory of its own, exactly as large."""
        deadline = Deadline(timeout)
        found: list[Bytes | None] = [None] * len(keys)
        with self._reported(), contextlib.suppress(FileNotFoundError), opened(self.path) as root:
            for index, key in enumerate(keys):
                deadline.check()
                with contextlib.suppress(FileNotFoundError):
                    found[index] = _read(root, key, limit)
        return found

    def put(self, values: Sequence[tuple[bytes, Sequence[Bytes]]], timeout: float) -> int:
        """Write each value's parts into a new file and move it to its place."""
        deadline = Deadline(timeout)
        stored = 0
        with (
            self._reported(),
            opened(self.path, create=True) as root,
            self._eviction.reservations(root, deadline) as reservations,
        ):
            for key, parts in values:
                deadline.check()
                stored += _put(reservations, key, [memoryview(part).cast("B") for part in parts])
        return stored

    def longest_prefix(self, keys: Sequence[bytes], limit: int, timeout: float) -> int:
        """Look only at the sizes of the files."""
        deadline = Deadline(timeout)
        with self._reported(), contextlib.suppress(FileNotFoundError), opened(self.path) as root:
            for index, key in enumerate(keys):
                deadline.check()
                size = _size(root, key)
                if size is None or size > limit:
                    return index
            return len(keys)
        return 0

    def delete(self, keys: Sequence[bytes], timeout: float) -> int:
        """Delete the files."""
        deadline = Deadline(timeout)
        count = freed = 0
        with self._reported(), contextlib.suppress(FileNotFoundError), opened(self.path) as root:
            block = room_in(root).block
            for key in keys:
                deadline.check()
                folder, name = value_name(key)
                with contextlib.suppress(FileNotFoundError), inside(root, folder) as shard:
                    space = space_of_value(shard, name, block)
                    os.unlink(name, dir_fd=shard)
                    freed += space
                    count += 1
            if freed:
                with self._eviction.reservations(root, deadline) as reservations:
                    reservations.give_back(freed)
        return count

    def stats(self, timeout: float) -> StoreStats:
        """Count the files of all engines."""
        with self._reported(), contextlib.suppress(FileNotFoundError), opened(self.path) as root:
            return self._eviction.stats(root, Deadline(timeout))
        return StoreStats(0, 0, None)

    def close(self) -> None:
        """Refuse further calls; nothing stays open between calls."""
        self._closed = True

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        if self._closed:
            raise StoreError(Trouble.OTHER, "the KV store is closed")
        try:
            yield
        except OSError as error:
            trouble = _TROUBLES.get(error.errno or 0, Trouble.OTHER)
            raise StoreError(trouble, f"the KV store in {self.path}: {error.strerror or 'it failed'}") from error


def _size(root: int, key: bytes) -> int | None:
    folder, name = value_name(key)
    try:
        with inside(root, folder) as shard:
            return size_of_value(shard, name)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read(root: int, key: bytes, limit: int) -> bytes | None:
    folder, name = value_name(key)
    with inside(root, folder) as shard:
        # Without O_NONBLOCK, opening a pipe of that name would wait for a writer.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=shard)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(Trouble.MALFORMED, "what the KV store has under a key is not a file")
        if found.st_size > limit:
            return None
        value = os.read(file, found.st_size)
        if len(value) != found.st_size:
            return None  # another process truncated the file meanwhile
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(file)
        return value
    finally:
        os.close(file)


def _put(reservations: DiskReservations, key: bytes, parts: list[memoryview]) -> bool:
    size = sum(map(len, parts))
    folder, name = value_name(key)
    reserved = reservations.reserve(size)
    if reserved is None:
        return False
    partial_name, file, _ = reserved
    try:
        _write(file, parts)
        with inside(reservations.root, folder, create=True) as shard:
            replaced = space_of_value(shard, name, room_in(reservations.root).block)
            os.rename(partial_name, name, src_dir_fd=reservations.partial, dst_dir_fd=shard)
    except OSError:
        _abandon(reservations, *reserved)
        raise
    os.close(file)
    reservations.give_back(replaced)
    return True


def _abandon(reservations: DiskReservations, name: str, file: int, space: int) -> None:
    os.close(file)
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=reservations.partial)
        reservations.give_back(space)


def _write(file: int, parts: list[memoryview]) -> None:
    waiting = [part for part in parts if len(part)]
    while waiting:
        written = os.writev(file, waiting[:_MAX_PARTS])
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.pop(0))
        if written:
            waiting[0] = waiting[0][written:]
