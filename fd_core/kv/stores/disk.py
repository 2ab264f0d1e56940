"""Store in a folder: survives restarts and kills, enforces a size limit, shared by the engines of one machine.

    FOLDER/ab/abcdef....kv      one value, named by its key in hex, in the sub-folder of the key's first byte
    FOLDER/partial/720960-...   a value that is being written, named by its space and a random number
    FOLDER/usage                space of all values, finished or not; locked while it changes

A value appears atomically, by a rename. Nothing is synced to the disk: after a power cut a file may be torn, which the
envelope detects. The deadline is checked between values; a system call that hangs, for example on an unreachable
network file system, cannot be interrupted. Every name is opened relative to its folder, and links are never followed.
Other files in the folder are never touched.

Space is counted in bytes as the file system allocates them, in whole blocks and with the overhead of a file: a value of
100 bytes takes 4,608. It is reserved before a value is written: the reservation is the file in `partial`, made under
the lock with the value's space in its name. So a count of the folder under the lock counts everything, and files left
by a killed engine make the number too large, never too small. When space runs out, all files are counted again and the
least recently used values are deleted, of any engine. Space runs out at the limit, or earlier if the file system is
full.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from fd_core.config.paths import user_path
from fd_core.config.sizes import format_size
from fd_core.errors import ConfigError
from fd_core.kv.stores.contract import MAX_KEY_BYTES, Bytes, Deadline, FailureReason, KVStore, StoreError, StoreStats
from fd_core.kv.stores.location import StoreLocation

PARTIAL: Final = "partial"

_FILE_BYTES: Final = 512
"""Approximate file system overhead of a file in bytes, excluding its content: an inode and a directory entry."""
_MAX_BLOCK: Final = 1 << 16
"""Limit of a plausible block size: file servers report their preferred transfer size, not the allocation unit."""
_SECTOR: Final = 512

_SHARD: Final = re.compile(r"[0-9a-f]{2}")
_VALUE: Final = re.compile(r"[0-9a-f]{2,64}\.kv")
_PARTIAL_NAME: Final = re.compile(r"([0-9]{1,15})-[0-9a-f]{16,64}")
DEFAULT_BYTES: Final = 10 << 30
SHARE_OF_FREE: Final = 0.5
"""Share of the disk, without other programs' files, that a store without a user limit may use."""
_USAGE: Final = "usage"
_KEPT_SHARE: Final = 7 / 8
"""Share of the limit that eviction leaves in use; the rest is free until the next count."""
_SPARE_BLOCKS: Final = 2
"""Blocks reserved for the folders of values."""
_STALE_SECONDS: Final = 900.0
"""Age at which a reservation is considered left by a crashed writer."""
_NEXT_TRY_SECONDS: Final = 0.001
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MAX_PARTS: Final = 1024
"""Maximum number of buffers in one system call."""
_FAILURE_REASONS: Final = {
    errno.ENOSPC: FailureReason.FULL,
    errno.EDQUOT: FailureReason.FULL,
    errno.EFBIG: FailureReason.FULL,
    errno.EROFS: FailureReason.READ_ONLY,
    errno.EACCES: FailureReason.DENIED,
    errno.EPERM: FailureReason.DENIED,
    errno.ENOENT: FailureReason.UNREACHABLE,
    errno.ENODEV: FailureReason.UNREACHABLE,
    errno.ENXIO: FailureReason.UNREACHABLE,
    errno.EIO: FailureReason.UNREACHABLE,
    errno.ESTALE: FailureReason.UNREACHABLE,
    errno.ENOTCONN: FailureReason.UNREACHABLE,
    errno.EHOSTDOWN: FailureReason.UNREACHABLE,
    errno.ETIMEDOUT: FailureReason.TIMEOUT,
    errno.ELOOP: FailureReason.MALFORMED,
    errno.ENOTDIR: FailureReason.MALFORMED,
    errno.EISDIR: FailureReason.MALFORMED,
}


def value_name(key: bytes) -> tuple[str, str]:
    """Return sub-folder and name of a key's file, in hex digits. Raises `StoreError` for a key of a wrong length."""
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise StoreError(FailureReason.OTHER, f"expected a key of 1 to {MAX_KEY_BYTES} bytes, got {len(key)}")
    digits = key.hex()
    return digits[:2], f"{digits}.kv"


@contextmanager
def opened(path: Path, *, create: bool = False) -> Iterator[int]:
    """Yield a descriptor of the store's folder; `path` itself may be a link.

    Raises `StoreError(FailureReason.UNREACHABLE, ...)` if `path` is not a folder.
    """
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileExistsError, NotADirectoryError) as error:
        # An error inside the folder affects a key or two; here the whole store is unavailable.
        raise StoreError(FailureReason.UNREACHABLE, f"the KV store at {path} is not a folder") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def inside(root: int, name: str, *, create: bool = False) -> Iterator[int]:
    """Yield a descriptor of the sub-folder `name`. Raises `NotADirectoryError` if it is a link."""
    try:
        descriptor = _open_folder(root, name)
    except FileNotFoundError:
        if not create:
            raise
        with contextlib.suppress(FileExistsError):  # another engine was faster
            os.mkdir(name, 0o700, dir_fd=root)
        descriptor = _open_folder(root, name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(root: int, name: str) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)


class FreeSpace(msgspec.Struct, frozen=True):
    """Free capacity of the file system of a folder."""

    block: int
    """Bytes of a block; files occupy whole blocks."""
    free: int
    """Free bytes available to this user."""
    full_of_files: bool
    """True if no further file can be created, not even an empty one."""


def free_space_of(root: int) -> FreeSpace:
    """Read the free capacity of the opened folder's file system."""
    usage = os.fstatvfs(root)
    block = usage.f_frsize or usage.f_bsize or 4096
    return FreeSpace(min(block, _MAX_BLOCK), usage.f_bavail * block, usage.f_files > 0 and usage.f_favail < 2)


def space_for(size: int, block: int) -> int:
    """Return the space of a file with `size` bytes of content."""
    return -(-size // block) * block + _FILE_BYTES


def space_of_value(folder: int, name: str, block: int) -> int:
    """Return the space of a value, 0 if it is absent."""
    found = _value(folder, name)
    return 0 if found is None else _space(found, block)


def _value(folder: int, name: str) -> os.stat_result | None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _space(found: os.stat_result, block: int) -> int:
    """Return the maximum of the space by size and by blocks: delayed allocation counts too few, preallocation more."""
    return max(space_for(found.st_size, block), found.st_blocks * _SECTOR + _FILE_BYTES)


class FoundFile(msgspec.Struct, frozen=True, order=True):
    """A file of the store; files sort by the time of their last use."""

    used_ns: int
    space: int
    folder: str
    name: str


def found_values(root: int, deadline: Deadline) -> Iterator[FoundFile]:
    """Yield every value. Raises `StoreError` after a sub-folder if the deadline has passed."""
    with os.scandir(root) as listing:
        shards = [entry.name for entry in listing if _SHARD.fullmatch(entry.name)]
    block = free_space_of(root).block
    for shard in shards:
        yield from _listed(root, shard, _VALUE, block=block)
        deadline.check()


def _listed(root: int, folder: str, names: re.Pattern[str], block: int) -> Iterator[FoundFile]:
    try:
        with inside(root, folder) as descriptor, os.scandir(descriptor) as listing:
            for entry in listing:
                if not names.fullmatch(entry.name):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another engine deleted it
                if stat.S_ISREG(found.st_mode):
                    yield FoundFile(found.st_mtime_ns, _space(found, block), folder, name=entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return


class DiskReservations:
    """Space that one store call reserves and frees in the opened folder `root`."""

    def __init__(self, store: DiskStore, root: int, partial: int, usage: int, deadline: Deadline) -> None:
        """`partial` is the folder of the reservations, `usage` the locked file."""
        self.root = root
        self.partial = partial
        self.deadline = deadline
        self.store = store
        self._usage = usage

    def reserve(self, size: int) -> tuple[str, int, int] | None:
        """Create the file in `partial` for a value of `size` bytes; return its name, open descriptor and space.

        Returns None for a value larger than the limit. Raises `StoreError(FailureReason.FULL, ...)` if other engines or
        other files occupy the space.
        """
        with self._locked():
            limit = self.store.limit_bytes(self.root, self.deadline)
            room = free_space_of(self.root)
            space = space_for(size, room.block)
            if space > limit:
                return None
            used = self._recorded()
            # Writing takes blocks for folders as well.
            short = room.free < space + _SPARE_BLOCKS * room.block or room.full_of_files
            if used is None or not self.store.counted or used + space > limit or short:
                used = _evict(self, space, limit, room=room)
                self.store.counted = True
            if used + space > limit:
                raise StoreError(
                    FailureReason.FULL, f"the KV store in {self.store.path} is full of values of other engines"
                )
            name = f"{space}-{secrets.token_hex(16)}"
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.partial)
            self._record(used + space)
            return name, file, space

    def give_back(self, space: int) -> None:
        """Record that so many bytes of space were freed, unless the deadline has passed: the next count corrects it."""
        if not space:
            return
        with contextlib.suppress(StoreError), self._locked():
            used = self._recorded()
            if used is not None:
                self._record(max(0, used - space))

    def _recorded(self) -> int | None:
        """Return the last recorded bytes in use, None if the record is unreadable."""
        text = os.pread(self._usage, 32, 0)
        return int(text) if text.isdigit() else None

    def _record(self, used: int) -> None:
        # Fixed length, so that no digit of a longer number is left over.
        os.pwrite(self._usage, b"%020d" % used, 0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. On a file system without locks, each engine enforces the limit without coordination."""
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


def _evict(reservations: DiskReservations, space: int, limit: int, room: FreeSpace) -> int:
    """Delete the least recently used values until `space` more fits; return the space in use.

    Raises `StoreError(FailureReason.FULL, ...)`, and deletes nothing, if that would not free enough.
    """
    root, deadline = reservations.root, reservations.deadline
    # Reservations first: a value that is finished meanwhile is counted twice rather than not at all.
    writing = 0
    for found in _listed(root, PARTIAL, _PARTIAL_NAME, block=1):
        if time.time() - found.used_ns / 1e9 < _STALE_SECONDS:
            writing += int(found.name.partition("-")[0])  # the space that was reserved for it
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(found.name, dir_fd=reservations.partial)
    values = sorted(found_values(root, deadline))
    used = writing + sum(found.space for found in values)
    given = used + room.free - _SPARE_BLOCKS * room.block
    if room.full_of_files:
        given = min(given, used)
    if writing + space > given:
        raise StoreError(FailureReason.FULL, f"No space left on the disk of the KV store in {reservations.store.path}")
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


class DiskStore(KVStore):
    """`disk:FOLDER` with `max_bytes`; the least recently used values are deleted first.

    The limit applies to the disk space of the values, in whole blocks, plus up to 1 MiB of folders. If the file system
    is smaller or fills up, less is used. Without `max_bytes` the limit is 10 GiB, but at most half of the sum of free
    disk space and the space of the store. Folder and files are accessible to their owner only, so engines that share
    the folder must run as one user.
    """

    name = "disk"

    def __init__(self, location: StoreLocation) -> None:
        super().__init__(location)
        location.require_known("max_bytes")
        if not location.rest or "\0" in location.rest:
            raise ConfigError(f"{location.shown} has no folder", field="--kv-store", hint="write disk:FOLDER")
        self.path = user_path(location.rest, "--kv-store")
        self._limit = location.size("max_bytes")
        self.counted = False
        """True if this engine counted the folder itself: totals recorded by other engines may be wrong."""
        self._closed = False

    def open(self, timeout: float) -> str:
        """Create the folder, reserve a file in it, and return the fill level."""
        deadline = Deadline(timeout)
        with self._reported(), opened(self.path, create=True) as root:
            with self._reservations(root, deadline) as reservations:
                reserved = reservations.reserve(0)
                if reserved:
                    _abandon(reservations, *reserved)
            full = self._full(root, deadline)
        return (
            f"disk {self.path}, {format_size(full.bytes or 0)} of at most {format_size(full.limit_bytes or 0)} in "
            f"{full.values:,} values"
        )

    def get(self, keys: Sequence[bytes], limit: int, timeout: float) -> list[Bytes | None]:
        """Read each file into separate memory of its exact size."""
        deadline = Deadline(timeout)
        found: list[Bytes | None] = [None] * len(keys)
        with self._reported(), contextlib.suppress(FileNotFoundError), opened(self.path) as root:
            for index, key in enumerate(keys):
                deadline.check()
                with contextlib.suppress(FileNotFoundError):
                    found[index] = _read(root, key, limit)
        return found

    def put(self, values: Sequence[tuple[bytes, Sequence[Bytes]]], timeout: float) -> int:
        """Write each value's parts into a new file and rename it to its final name."""
        deadline = Deadline(timeout)
        stored = 0
        with (
            self._reported(),
            opened(self.path, create=True) as root,
            self._reservations(root, deadline) as reservations,
        ):
            for key, parts in values:
                deadline.check()
                stored += _put(reservations, key, [memoryview(part).cast("B") for part in parts])
        return stored

    def longest_prefix(self, keys: Sequence[bytes], limit: int, timeout: float) -> int:
        """Compare only the sizes of the files."""
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
            block = free_space_of(root).block
            for key in keys:
                deadline.check()
                folder, name = value_name(key)
                with contextlib.suppress(FileNotFoundError), inside(root, folder) as shard:
                    space = space_of_value(shard, name, block)
                    os.unlink(name, dir_fd=shard)
                    freed += space
                    count += 1
            if freed:
                with self._reservations(root, deadline) as reservations:
                    reservations.give_back(freed)
        return count

    def stats(self, timeout: float) -> StoreStats:
        """Count the files of all engines."""
        with self._reported(), contextlib.suppress(FileNotFoundError), opened(self.path) as root:
            return self._full(root, Deadline(timeout))
        return StoreStats(0, 0, None)

    def close(self) -> None:
        """Reject further calls; no file stays open between calls."""
        self._closed = True

    def limit_bytes(self, root: int, deadline: Deadline) -> int:
        """Return the limit in bytes, derived from the free space if the user gave none."""
        if self._limit is None:
            free = shutil.disk_usage(root).free + sum(value.space for value in found_values(root, deadline))
            self._limit = min(DEFAULT_BYTES, int(free * SHARE_OF_FREE))
        return self._limit

    def _full(self, root: int, deadline: Deadline) -> StoreStats:
        values = list(found_values(root, deadline))
        return StoreStats(len(values), sum(value.space for value in values), self.limit_bytes(root, deadline))

    @contextlib.contextmanager
    def _reservations(self, root: int, deadline: Deadline) -> Iterator[DiskReservations]:
        """Yield the reservations of one call that writes to or deletes from the opened folder `root`."""
        with contextlib.ExitStack() as stack:
            usage = os.open(_USAGE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=root)
            stack.callback(os.close, usage)
            partial = stack.enter_context(inside(root, PARTIAL, create=True))
            yield DiskReservations(self, root, partial, usage=usage, deadline=deadline)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        if self._closed:
            raise StoreError(FailureReason.OTHER, "the KV store is closed")
        try:
            yield
        except OSError as error:
            reason = _FAILURE_REASONS.get(error.errno or 0, FailureReason.OTHER)
            raise StoreError(reason, f"the KV store in {self.path}: {error.strerror or 'it failed'}") from error


def _size(root: int, key: bytes) -> int | None:
    folder, name = value_name(key)
    try:
        with inside(root, folder) as shard:
            found = _value(shard, name)
            return None if found is None else found.st_size
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
            raise StoreError(FailureReason.MALFORMED, "the KV store entry of a key is not a file")
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
            replaced = space_of_value(shard, name, free_space_of(reservations.root).block)
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
