"""Files and batches on disk, in one folder that one server owns; small facts are kept in memory as well.

`ID.json` describes a file or a batch and says whose it is, `ID.data` is the content of a file. A description is written
whole or not at all.
"""

from __future__ import annotations

import fcntl
import re
import secrets
import time
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

from fd_core.server.errors import ApiError, invalid, unavailable

__all__ = ["BatchCounts", "BatchError", "BatchErrors", "BatchStore", "StoredBatch", "StoredFile", "cannot_keep"]

T = TypeVar("T")

_ID: Final = re.compile(r"(file-|batch_)[0-9a-f]{24}")
_MOST_FILES: Final = 10_000
_MOST_BATCHES: Final = 1_000
"""Batches beyond this are forgotten, those that ended first of all."""
_ENDED: Final = frozenset(("failed", "completed", "expired", "cancelled"))


class StoredFile(msgspec.Struct, kw_only=True):
    """OpenAI's file object."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    """Unix time, seconds."""
    filename: str
    purpose: str
    status: str = "processed"


class BatchCounts(msgspec.Struct):
    """How many requests of a batch are over."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct):
    """What is wrong with a line of the input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    """Why a batch failed as a whole."""

    data: list[BatchError]
    object: str = "list"


class StoredBatch(msgspec.Struct, kw_only=True):
    """OpenAI's batch object; times are Unix time in seconds."""

    id: str
    object: str = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str = "validating"
    created_at: int
    expires_at: int
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: BatchErrors | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts = msgspec.field(default_factory=BatchCounts)
    metadata: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in _ENDED


class _Owned(msgspec.Struct):
    """Whose a file or a batch is; of nobody's key where there were no keys."""

    owner: str = ""


class BatchStore:
    """Owner of one folder. Every method blocks for as long as the disk does; reading descriptions needs no disk."""

    def __init__(self, folder: Path, limit: int) -> None:
        """`limit` bounds the bytes of all files.

        Raises `ApiError` (503) if another server has the folder, or if nothing can be written there.
        """
        self.folder = folder
        self.limit = limit
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("ab")
        except OSError as error:
            raise cannot_keep(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise unavailable(
                "another server on this machine has the folder of files and batches; give each its --batch-store",
                "batch_store_in_use",
                retry_after=60,
            ) from None
        for left in folder.glob("*.upload"):
            left.unlink()
        self._owners: dict[str, str] = {}
        """Of files and batches; whoever asks for one that is not theirs is told that there is none."""
        self.files: dict[str, StoredFile] = {
            each.id: each for each in self._read(StoredFile, "file-*.json") if self.content(each.id).exists()
        }
        for left in folder.glob("file-*.data"):  # of a server that died before it had described them
            if left.stem not in self.files:
                left.unlink()
        self.batches: dict[str, StoredBatch] = {each.id: each for each in self._read(StoredBatch, "batch_*.json")}

    def close(self) -> None:
        """Let another server have the folder."""
        self._lock.close()

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return sum(each.bytes for each in self.files.values())

    def owner(self, name: str) -> str:
        """Return whose a file or a batch is, as `KeyRing.owner` says it."""
        return self._owners[name]

    def own(self, name: str, owner: str) -> None:
        """Say whose a file or a batch is that is about to be kept."""
        self._owners[name] = owner

    def has(self, name: str, owner: str) -> bool:
        """Whether an owner has a file or a batch of this id."""
        return self._owners.get(name) == owner

    def files_of(self, owner: str) -> list[StoredFile]:
        """Return an owner's files, oldest first."""
        return [each for each in self.files.values() if self.has(each.id, owner)]

    def batches_of(self, owner: str) -> list[StoredBatch]:
        """Return an owner's batches, oldest first."""
        return [each for each in self.batches.values() if self.has(each.id, owner)]

    def file(self, file_id: str, owner: str) -> StoredFile:
        """Return the description of an owner's file; `ApiError` (404) if there is no such file."""
        return self._known(self.files, file_id, owner, "file")

    def batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Return an owner's batch; `ApiError` (404) if there is none of that id."""
        return self._known(self.batches, batch_id, owner, "batch")

    def content(self, file_id: str) -> Path:
        """Return where the content of a file is."""
        if not _ID.fullmatch(file_id):
            raise ValueError("not an id of a file")
        return self.folder / f"{file_id}.data"

    def require_room(self, size: int) -> None:
        """Raise `ApiError` (400) if the store cannot take `size` more bytes, or another file."""
        if len(self.files) >= _MOST_FILES:
            raise invalid(f"the server keeps {_MOST_FILES:,} files already; delete some", "file", "store_full")
        if self.used + size > self.limit:
            raise invalid(
                f"the server keeps {self.used:,} bytes of files and may keep {self.limit:,}, which leaves no room for "
                f"{size:,} more; delete some, or start it with a larger --batch-store-limit",
                "file",
                "store_full",
            )

    def add(self, source: BinaryIO, begin: int, size: int, filename: str, purpose: str, owner: str) -> StoredFile:
        """Keep `size` bytes of `source` from `begin` on as a new file of an owner's; see `require_room`."""
        self.require_room(size)
        file_id = f"file-{secrets.token_hex(12)}"
        source.seek(begin)
        try:
            with self.content(file_id).open("xb") as target:
                _copy(source, target, size)
        except OSError:
            self.content(file_id).unlink(missing_ok=True)
            raise
        return self._keep(file_id, filename, purpose, owner)

    def adopt(self, path: Path, filename: str, owner: str) -> StoredFile:
        """Keep a file that lies in the folder already, the output of a batch of an owner's."""
        file_id = f"file-{secrets.token_hex(12)}"
        path.replace(self.content(file_id))
        return self._keep(file_id, filename, "batch_output", owner)

    def delete(self, file_id: str, owner: str) -> None:
        """Forget an owner's file. Raises `ApiError`: 404 if there is none, 400 if a batch needs it."""
        self.file(file_id, owner)
        for batch in self.batches.values():
            if batch.input_file_id == file_id and not batch.ended:
                raise invalid(f"the batch {batch.id} needs this file; cancel it first", "file_id", "file_in_use")
        (self.folder / f"{file_id}.json").unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)
        del self.files[file_id], self._owners[file_id]

    def save(self, batch: StoredBatch) -> None:
        """Keep a batch as it is now, and forget the oldest that ended if there are too many."""
        self.batches[batch.id] = batch
        self._write(batch.id, batch)
        over = [each for each in self.batches.values() if each.ended][: max(0, len(self.batches) - _MOST_BATCHES)]
        for old in over:
            (self.folder / f"{old.id}.json").unlink(missing_ok=True)
            del self.batches[old.id], self._owners[old.id]

    def _keep(self, file_id: str, filename: str, purpose: str, owner: str) -> StoredFile:
        size = self.content(file_id).stat().st_size
        found = StoredFile(
            id=file_id, bytes=size, created_at=int(time.time()), filename=filename[:255], purpose=purpose
        )
        self.own(file_id, owner)
        self._write(file_id, found)
        self.files[file_id] = found
        return found

    def _known(self, found: dict[str, T], name: str, owner: str, kind: str) -> T:
        if name not in found or not self.has(name, owner):
            raise ApiError(404, f"there is no {kind} {name[:64]!r}", param=f"{kind}_id", code=f"{kind}_not_found")
        return found[name]

    def _write(self, name: str, value: StoredFile | StoredBatch) -> None:
        path = self.folder / f"{name}.json"
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(msgspec.to_builtins(value) | {"owner": self._owners[name]}))
        new.replace(path)

    def _read(self, kind: type[Any], pattern: str) -> list[Any]:
        """Return what was kept, oldest first; what cannot be read is left alone."""
        found = []
        for path in self.folder.glob(pattern):
            try:
                written = path.read_bytes()
                each = msgspec.json.decode(written, type=kind)
                owner = msgspec.json.decode(written, type=_Owned).owner
            except (OSError, msgspec.MsgspecError):
                continue
            if each.id == path.stem and _ID.fullmatch(each.id):
                found.append(each)
                self.own(each.id, owner)
        return sorted(found, key=lambda each: (each.created_at, each.id))


def cannot_keep(error: OSError) -> ApiError:
    """Return what a client is told where the disk fails."""
    reason = (error.strerror or str(error)).lower()
    return unavailable(f"the server cannot keep files: {reason}; see --batch-store", "batch_store_failed", 60)


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    left = size
    while left:
        part = source.read(min(left, 1 << 20))
        if not part:
            raise OSError("the upload is shorter than it was")
        target.write(part)
        left -= len(part)
