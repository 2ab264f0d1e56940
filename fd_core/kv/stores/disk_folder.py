"""The folder of a disk store: names of its files, and ways to open them that follow no link.

    FOLDER/ab/abcdef....kv      one value, named by its key in hex, in the sub-folder of the key's first byte
    FOLDER/partial/720960-...   a value that is being written, named by its size in bytes and a random number
    FOLDER/usage                bytes in all values, finished or not; locked while it changes

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

__all__ = ["PARTIAL", "FoundFile", "found_partials", "found_values", "inside", "opened", "size_of_value", "value_name"]

PARTIAL: Final = "partial"

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


def size_of_value(folder: int, name: str) -> int | None:
    """Return the size of a value in bytes, None if there is none."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


@dataclass(frozen=True, slots=True, order=True)
class FoundFile:
    """A file of the store; files sort by the time of their last use."""

    used_ns: int
    size: int
    folder: str
    name: str


def found_partials(root: int) -> Iterator[FoundFile]:
    """Yield the values being written, those of dead writers included, each with the size that was reserved for it."""
    for entry in _listed(root, PARTIAL, _PARTIAL_NAME):
        size, _, _ = entry.name.partition("-")
        yield FoundFile(entry.used_ns, int(size), PARTIAL, entry.name)


def found_values(root: int, deadline: Deadline) -> Iterator[FoundFile]:
    """Yield every value. Raises `StoreError` after a sub-folder if the deadline has passed."""
    with os.scandir(root) as listing:
        shards = [entry.name for entry in listing if _SHARD.fullmatch(entry.name)]
    for shard in shards:
        yield from _listed(root, shard, _VALUE)
        deadline.check()


def _listed(root: int, folder: str, names: re.Pattern[str]) -> Iterator[FoundFile]:
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
                    yield FoundFile(found.st_mtime_ns, found.st_size, folder, entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
