"""The folder of a disk store: names of its files, and ways to open them that follow no link.

    FOLDER/ab/abcdef....kv      one value, named by its key in hex, in the sub-folder of the key's first byte
    FOLDER/partial/720960-...   a value that is being written, named by the space that it takes and a random number
    FOLDER/usage                space that all values take, finished or not; locked while it changes

Space is counted in bytes as the file system gives them, in whole blocks and with what a file takes beside its content:
a value of 100 bytes takes 4,608.

Every name is opened relative to the folder that holds it, and never if it is a link. Other files in the folder are
never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fd_core.kv.stores.contract import MAX_KEY_BYTES, Deadline, StoreError, Trouble

PARTIAL: Final = "partial"

_FILE_BYTES: Final = 512
"""What the system takes for a file beside its content: an inode and its entry in a folder, about."""
_MAX_BLOCK: Final = 1 << 16
"""Servers of files tell how much they like to move at once, which is not what a file takes."""
_SECTOR: Final = 512

_SHARD: Final = re.compile(r"[0-9a-f]{2}")
_VALUE: Final = re.compile(r"[0-9a-f]{2,64}\.kv")
_PARTIAL_NAME: Final = re.compile(r"([0-9]{1,15})-[0-9a-f]{16,64}")


def value_name(key: bytes) -> tuple[str, str]:
    """Return sub-folder and name of a key's file. Only hex digits of the key reach the path.

    Raises `StoreError` for a key that is empty or too long.
    """
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise StoreError(Trouble.OTHER, f"a key of {len(key)} bytes is not between 1 and {MAX_KEY_BYTES}")
    digits = key.hex()
    return digits[:2], f"{digits}.kv"


@contextmanager
def opened(path: Path, *, create: bool = False) -> Iterator[int]:
    """Give a descriptor of the store's folder; `path` itself may be a link.

    Raises `StoreError(Trouble.UNREACHABLE, ...)` if `path` is something else than a folder.
    """
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileExistsError, NotADirectoryError) as error:
        # Something wrong inside the folder concerns a key or two; here the whole store is out of reach.
        raise StoreError(Trouble.UNREACHABLE, f"{path}, where the KV store should be, is not a folder") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def inside(root: int, name: str, *, create: bool = False) -> Iterator[int]:
    """Give a descriptor of the sub-folder `name`; NotADirectoryError if it is a link."""
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


@dataclass(frozen=True, slots=True)
class Room:
    """What the file system of a folder has left."""

    block: int
    """Bytes of a block: a file takes whole ones."""
    free: int
    """Bytes that the user may still take."""
    full_of_files: bool
    """Whether no further file can be made, however small."""


def room_in(root: int) -> Room:
    """Ask the file system of the opened folder."""
    told = os.fstatvfs(root)
    block = told.f_frsize or told.f_bsize or 4096
    return Room(min(block, _MAX_BLOCK), told.f_bavail * block, told.f_files > 0 and told.f_favail < 2)


def space_for(size: int, block: int) -> int:
    """Return the bytes that a file of `size` bytes takes."""
    return -(-size // block) * block + _FILE_BYTES


def size_of_value(folder: int, name: str) -> int | None:
    """Return the size of a value in bytes, None if there is none."""
    found = _value(folder, name)
    return None if found is None else found.st_size


def space_of_value(folder: int, name: str, block: int) -> int:
    """Return the space that a value takes, 0 if there is none."""
    found = _value(folder, name)
    return 0 if found is None else _space(found, block)


def _value(folder: int, name: str) -> os.stat_result | None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _space(found: os.stat_result, block: int) -> int:
    """Systems that write later count no blocks at first; those that keep some ready count more."""
    return max(space_for(found.st_size, block), found.st_blocks * _SECTOR + _FILE_BYTES)


@dataclass(frozen=True, slots=True, order=True)
class FoundFile:
    """A file of the store; files sort by the time of their last use."""

    used_ns: int
    space: int
    folder: str
    name: str


def found_partials(root: int) -> Iterator[FoundFile]:
    """Yield the values being written, those of dead writers included, each with the space that was reserved for it."""
    for entry in _listed(root, PARTIAL, _PARTIAL_NAME, 1):
        space, _, _ = entry.name.partition("-")
        yield FoundFile(entry.used_ns, int(space), PARTIAL, entry.name)


def found_values(root: int, deadline: Deadline) -> Iterator[FoundFile]:
    """Yield every value. Raises `StoreError` after a sub-folder if the deadline has passed."""
    with os.scandir(root) as listing:
        shards = [entry.name for entry in listing if _SHARD.fullmatch(entry.name)]
    block = room_in(root).block
    for shard in shards:
        yield from _listed(root, shard, _VALUE, block)
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
                    yield FoundFile(found.st_mtime_ns, _space(found, block), folder, entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
