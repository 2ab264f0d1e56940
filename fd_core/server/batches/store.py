"""Files and batches on disk, in one folder that one server owns, and their index in memory.

`ID.json` describes a file or a batch and names its owner, `ID.data` is the content of a file. Both appear whole or not
at all: they are written under a temporary name and renamed. A file exists from the moment at which its content has its
name. Everything is counted before it is written and counted again when a server opens the folder; lists and
descriptions are read from the index.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar

import msgspec

from fd_core.http.errors import ApiError, invalid, unavailable
from fd_core.server.batches.accounts import Account, OwnedIndex
from fd_core.server.batches.lines import truncate_partial_line

log = logging.getLogger(__name__)

T = TypeVar("T")
D = TypeVar("D", "StoredFile", "StoredBatch")
Answers = Literal["output", "errors"]
"""The two files that a batch may leave."""

_FILE: Final = re.compile(r"file-[0-9a-f]{24}")
_BATCH: Final = re.compile(r"batch_[0-9a-f]{24}")
_ANSWER_NAME: Final = re.compile(r"(batch_[0-9a-f]{24})_(output|errors)\.jsonl(\.partial)?")
ANSWERS: Final[tuple[Answers, Answers]] = ("output", "errors")
_MOST_FILES: Final = 10_000
_MOST_BATCHES: Final = 10_000
"""Limit for all keys; when a key starts a batch beyond its share, its oldest ended batch is deleted."""
_ENDED: Final = frozenset(("failed", "completed", "expired", "cancelled"))
_STRANGE: Final = "?"
"""Owner of bytes in the folder that belong to no file or batch."""
_PART_BYTES: Final = 1 << 20


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
    """Numbers of requests of a batch, total and finished."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct):
    """Error in a line of the input."""

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
        """True if the batch is in a final state."""
        return self.status in _ENDED


class _Ownership(msgspec.Struct):
    """The owner of a file or a batch; "" where there were no keys."""

    owner: str = ""


class BatchStore:
    """Owner of one folder. All methods are called from one thread, except where those of `Upload` state otherwise."""

    def __init__(
        self, folder: Path, limit: int, key_limit: int | None = None, keys: Callable[[], int] = lambda: 0
    ) -> None:
        """Lock the folder and read it, which may take long. Raises `ApiError` (503) if another server has locked it."""
        self.folder = folder
        more = "delete files, or increase --batch-store-limit or --batch-store-key-limit"
        self.bytes = Account("bytes", limit, keys, remedy=more, key_limit=key_limit)
        self._file_count = Account("files", _MOST_FILES, keys, remedy="delete some")
        self._batch_count = Account("batches", _MOST_BATCHES, keys, remedy="retry after one has ended", param=None)
        self.files: OwnedIndex[StoredFile] = OwnedIndex()
        self.batches: OwnedIndex[StoredBatch] = OwnedIndex()
        self._pending: dict[str, dict[str, None]] = {}
        """Batches that have not ended, by owner, the oldest first."""
        self._inputs: Counter[str] = Counter()
        """Files that batches need which have not ended."""
        self._described: dict[str, int] = {}
        """Bytes of descriptions on disk, by id."""
        self._aside: dict[str, int] = {}
        """Bytes of descriptions under their temporary names, by id."""
        self._answer_bytes: Counter[tuple[str, Answers]] = Counter()
        """Counted bytes of answers that are no files yet, by batch."""
        self._readers: Counter[str] = Counter()
        """Open contents, by file."""
        self._deleted: dict[str, tuple[str, int]] = {}
        """Owner and bytes of deleted files that are still being read."""
        with contextlib.ExitStack() as undo:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = undo.enter_context((folder / "lock").open("ab"))
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._load()
            except BlockingIOError:
                message = (
                    "another server on this machine uses the same folder for files and batches; set --batch-store for "
                    "each"
                )
                raise unavailable(message, "batch_store_in_use", retry_after=60) from None
            except OSError as error:
                raise cannot_keep(error) from error
            undo.pop_all()

    def close(self) -> None:
        """Unlock the folder for another server."""
        self._lock.close()

    def file(self, file_id: str, owner: str) -> StoredFile:
        """Return the description of an owner's file; `ApiError` (404) if there is no such file."""
        return _known(self.files, file_id, owner, kind="file")

    def content(self, file_id: str) -> Path:
        """Return where the content of a file is."""
        if not _FILE.fullmatch(file_id):
            raise ValueError("not a file id")
        return self.folder / f"{file_id}.data"

    def upload(self, owner: str) -> Upload:
        """Begin to receive a file. Raises `ApiError` (429) if the owner keeps too many."""
        self._file_count.take(owner, 1)
        return Upload(self, owner)

    def delete(self, file_id: str, owner: str) -> None:
        """Delete an owner's file, which its readers read to the end; `ApiError`: 404, 400 if a batch needs it, 503."""
        file = self.file(file_id, owner)
        if self._inputs[file_id]:
            for batch_id in self._pending[owner]:
                if self.batches[batch_id].input_file_id == file_id:
                    raise invalid(f"the file is in use by batch {batch_id}; cancel it first", "file_id", "file_in_use")
        try:
            self.content(file_id).unlink(missing_ok=True)
        except OSError as error:
            raise cannot_keep(error) from error
        self.files.remove(file_id)
        self._file_count.add(owner, -1)
        if self._readers[file_id]:
            self._deleted[file_id] = owner, file.bytes
        else:
            self.bytes.add(owner, -file.bytes)
        self._remove_description(file_id, owner)

    def batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Return an owner's batch; `ApiError` (404) if there is none of that id."""
        return _known(self.batches, batch_id, owner, kind="batch")

    def begin(self, batch: StoredBatch, owner: str) -> None:
        """Store a new batch, reserve room for its files; may evict an ended one. Raises `ApiError` (429), `OSError`."""
        try:
            self._batch_count.require(owner, 1)
        except ApiError:
            old = next((each.id for each in self.batches.oldest(owner) if each.ended), None)
            if old is None:
                raise
            self._remove_description(old, owner)
            self.batches.remove(old)
            self._batch_count.add(owner, -1)
        with contextlib.ExitStack() as undo:
            for account, count in ((self._batch_count, 1), (self._file_count, len(ANSWERS))):
                account.take(owner, count)
                undo.callback(account.add, owner, -count)
            self._describe(batch, owner, new=True)
            undo.pop_all()
        self._add_batch(batch, owner)

    def save(self, batch_id: str, **changes: Any) -> StoredBatch:
        """Return a batch with `changes`, once they are on disk. Raises `OSError` without changing anything."""
        owner = self.batches.owner(batch_id)
        batch = msgspec.structs.replace(self.batches[batch_id], **changes)
        self._describe(batch, owner)
        self.batches.put(batch.id, owner, batch)
        if batch.ended and self._pending.get(owner, {}).pop(batch.id, "") is None:
            self._inputs[batch.input_file_id] -= 1
            self._file_count.add(owner, -len(ANSWERS))
            if not self._pending[owner]:
                del self._pending[owner]
        return batch

    @property
    def waiting(self) -> list[str]:
        """Owners of batches that have not ended."""
        return list(self._pending)

    def next_batch(self, owner: str) -> StoredBatch | None:
        """Return an owner's oldest batch that has not ended."""
        found = next(iter(self._pending.get(owner, ())), None)
        return None if found is None else self.batches[found]

    def reserve_answers(self, batch_id: str, kind: Answers, more: int) -> None:
        """Reserve bytes before answers of a batch are appended. Raises `ApiError` (413, 429)."""
        self.bytes.take(self.batches.owner(batch_id), more)
        self._answer_bytes[batch_id, kind] += more

    def recount_answers(self, batch_id: str, kind: Answers, size: int) -> None:
        """Count answers of a batch as the `size` bytes that are on disk."""
        self.bytes.add(self.batches.owner(batch_id), size - self._answer_bytes[batch_id, kind])
        self._answer_bytes[batch_id, kind] = size

    def answers(self, batch: StoredBatch, kind: Answers) -> Path:
        """Return where answers of a batch become a file; until then the name ends in `.partial`."""
        return self.folder / f"{batch.id}_{kind}.jsonl"

    def conclude(self, batch_id: str, errors: BatchErrors | None = None) -> StoredBatch:
        """Make the answers of a batch files, and end it. Raises `OSError`; the call may then be repeated."""
        batch, now, owner = self.batches[batch_id], int(time.time()), self.batches.owner(batch_id)
        if batch.ended:
            return batch
        if batch.status != "finalizing":
            batch = self.save(batch_id, status="finalizing", finalizing_at=now, errors=errors)
        kept = {kind: self._adopt(batch, kind, owner) for kind in ANSWERS}
        counts = batch.request_counts
        if batch.errors is not None:
            end = "failed"
        elif batch.cancelling_at is not None:
            end = "cancelled"
        else:
            whole = batch.in_progress_at is not None and counts.completed + counts.failed == counts.total
            end = "completed" if whole else "expired"
        files = {"output_file_id": kept["output"], "error_file_id": kept["errors"]}
        return self.save(batch_id, status=end, **files, **{f"{end}_at": now})

    def _adopt(self, batch: StoredBatch, kind: Answers, owner: str) -> str | None:
        """Turn answers of a batch into a file, idempotently; return its id, None if there are none."""
        # A deterministic id makes retries idempotent.
        file_id = f"file-{hashlib.blake2b(f'{batch.id} {kind}'.encode(), digest_size=12).hexdigest()}"
        unfinished = _partial(self.answers(batch, kind))
        if file_id in self.files or not unfinished.exists():
            return file_id if file_id in self.files else None
        with unfinished.open("r+b", buffering=0) as answers:
            size = truncate_partial_line(answers)
        self.recount_answers(batch.id, kind, size)
        if not size:
            unfinished.unlink()
            del self._answer_bytes[batch.id, kind]
            return None
        file = StoredFile(
            id=file_id,
            bytes=size,
            created_at=int(time.time()),
            filename=self.answers(batch, kind).name,
            purpose="batch_output",
        )
        self._describe(file, owner)
        unfinished.replace(self.content(file_id))
        self._answer_bytes.pop((batch.id, kind))
        self._file_count.add(owner, 1)
        self.files.put(file_id, owner, file, file.purpose)
        return file_id

    def _add_batch(self, batch: StoredBatch, owner: str) -> None:
        self.batches.put(batch.id, owner, batch)
        if not batch.ended:
            self._pending.setdefault(owner, {})[batch.id] = None
            self._inputs[batch.input_file_id] += 1

    def _describe(self, value: StoredFile | StoredBatch, owner: str, *, new: bool = False) -> None:
        """Write a description. Raises `OSError`, and `ApiError` for a `new` one without room."""
        text = msgspec.json.encode(msgspec.to_builtins(value) | {"owner": owner})
        if new:
            self.bytes.require(owner, len(text))
        path = self.folder / f"{value.id}.json"
        aside = path.with_suffix(".new")
        before = self._aside.get(value.id, 0)  # of an attempt whose file could not be removed
        self._aside[value.id] = max(before, len(text))
        self.bytes.add(owner, self._aside[value.id] - before)
        try:
            aside.write_bytes(text)
            aside.replace(path)
        except OSError:
            if _removed(aside):
                self.bytes.add(owner, -self._aside.pop(value.id))
            raise
        self.bytes.add(owner, len(text) - self._aside.pop(value.id) - self._described.get(value.id, 0))
        self._described[value.id] = len(text)

    def _remove_description(self, name: str, owner: str) -> None:
        """Remove a description; one that cannot be deleted counts until a server opens the folder again."""
        size = self._described.pop(name, 0)
        if _removed(self.folder / f"{name}.json"):
            self.bytes.add(owner, -size)

    def _load(self) -> None:
        """Read and count the content of the folder, and remove files that belong to no file or batch."""
        sizes = {path: path.stat().st_size for path in self.folder.iterdir() if path.is_file()}
        for batch, owner in _described(sizes, StoredBatch, _BATCH):
            self._add_batch(batch, owner)
            self._batch_count.add(owner, 1)
            self._file_count.add(owner, 0 if batch.ended else len(ANSWERS))
            self._count_description(batch.id, owner, sizes)
        for file, owner in _described(sizes, StoredFile, _FILE):
            size = sizes.pop(self.content(file.id), None)
            if size is not None:
                file.bytes = size
                self.files.put(file.id, owner, file, file.purpose)
                self.bytes.add(owner, size)
                self._file_count.add(owner, 1)
                self._count_description(file.id, owner, sizes)
        for path, size in sizes.items():
            self._load_other(path, size)

    def _count_description(self, name: str, owner: str, sizes: dict[Path, int]) -> None:
        self._described[name] = sizes.pop(self.folder / f"{name}.json")
        self.bytes.add(owner, self._described[name])

    def _load_other(self, path: Path, size: int) -> None:
        """Count a file that is no description of a file or batch and no content, or remove it."""
        owner = _STRANGE
        if (found := _ANSWER_NAME.fullmatch(path.name)) is not None:
            batch_id = found[1]
            if batch_id in self.batches and not self.batches[batch_id].ended:
                if found[3] is None:  # of a version that renamed answers before they became a file
                    path = path.replace(_partial(path))
                kind: Answers = "output" if found[2] == "output" else "errors"
                self.recount_answers(batch_id, kind, size)
                counts = self.batches[batch_id].request_counts
                if kind == "output":
                    counts.completed = _lines_of(path)
                else:
                    counts.failed = _lines_of(path)
                return
            left = True
        elif path.suffix == ".data":
            left = _FILE.fullmatch(path.stem) is not None and not path.with_suffix(".json").exists()
        elif path.suffix == ".json":  # of a file whose content was never there, or was deleted
            left = _FILE.fullmatch(path.stem) is not None and not path.with_suffix(".data").exists()
        else:
            left = path.suffix in (".upload", ".new")
        if path.name != "lock" and not (left and _removed(path)):
            self.bytes.add(owner, size)

    def release(self, file_id: str) -> None:
        """Record that a content is no longer read."""
        self._readers[file_id] -= 1
        if not self._readers[file_id]:
            del self._readers[file_id]
            owner, size = self._deleted.pop(file_id, ("", 0))
            self.bytes.add(owner, -size)

    def read(self, file_id: str, owner: str) -> StoredContent:
        """Open the content of an owner's file. Raises `ApiError` (404, 503)."""
        file = self.file(file_id, owner)
        try:
            content = self.content(file_id).open("rb")
        except OSError as error:
            raise cannot_keep(error) from error
        self._readers[file_id] += 1
        return StoredContent(self, file, content)


class StoredContent(AbstractContextManager["StoredContent"]):
    """Open content of a file; a context manager. The bytes count until it is closed, also if the file is deleted."""

    def __init__(self, store: BatchStore, file: StoredFile, content: IO[bytes]) -> None:
        self.file = file
        self.content = content
        self._store = store

    def __exit__(self, *_: object) -> None:
        self.content.close()
        self._store.release(self.file.id)


class Upload(AbstractContextManager["Upload"]):
    """An upload in progress, under a temporary name; a context manager that removes it unless it was kept."""

    def __init__(self, store: BatchStore, owner: str) -> None:
        self.path = store.folder / f"{secrets.token_hex(12)}.upload"
        self.size = 0
        self._written = 0
        self._store = store
        self._owner = owner
        self._file: IO[bytes] | None = None
        self._kept = False

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._kept:
            return
        self._store._file_count.add(self._owner, -1)
        if _removed(self.path):
            self._store.bytes.add(self._owner, -self.size)

    def reserve(self, more: int) -> None:
        """Reserve bytes before they are written. Raises `ApiError` (413, 429)."""
        self._store.bytes.take(self._owner, more)
        self.size += more

    def write(self, part: bytes) -> None:
        """Append bytes that were reserved; may run in another thread."""
        if self._file is None:
            self._file = self.path.open("xb", buffering=0)
        _write(self._file, part)
        self._written += len(part)

    def keep(self, filename: str, purpose: str) -> StoredFile:
        """Turn the written bytes into a file, and release the rest. Raises `ApiError` (429, 503)."""
        store, owner, size = self._store, self._owner, self._written
        store.bytes.add(owner, size - self.size)
        self.size = size
        file = StoredFile(
            id=f"file-{secrets.token_hex(12)}",
            bytes=size,
            created_at=int(time.time()),
            # Shown only; it is never the name of a file on disk.
            filename="".join(letter if letter.isprintable() else "?" for letter in filename[:255]),
            purpose=purpose,
        )
        store._describe(file, owner, new=True)
        try:
            self.path.replace(store.content(file.id))
        except OSError:
            store._remove_description(file.id, owner)
            raise
        self._kept = True
        store.files.put(file.id, owner, file, purpose)
        return file


def cannot_keep(error: OSError) -> ApiError:
    """Return the error for a client whose request failed because of the disk."""
    reason = (error.strerror or str(error)).lower()
    return unavailable(f"files cannot be stored: {reason}; see --batch-store", "batch_store_failed", 60)


def _described(paths: Iterable[Path], kind: type[D], pattern: re.Pattern[str]) -> list[tuple[D, str]]:
    found = []
    for path in paths:
        if path.suffix == ".json" and pattern.fullmatch(path.stem):
            text = path.read_bytes()
            try:
                value, owner = msgspec.json.decode(text, type=kind), msgspec.json.decode(text, type=_Ownership).owner
            except (msgspec.MsgspecError, UnicodeDecodeError):
                value, owner = None, ""
            if value is None or value.id != path.stem:
                log.warning("%s cannot be read and is ignored", path)
            else:
                found.append((value, owner))
    return sorted(found, key=lambda each: (each[0].created_at, each[0].id))


def _known(found: OwnedIndex[T], name: str, owner: str, kind: str) -> T:
    value = found.get(name, owner)
    if value is None:
        raise ApiError(404, f"{kind} {name[:64]!r} does not exist", param=f"{kind}_id", code=f"{kind}_not_found")
    return value


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _removed(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed and still counts against the limit: %s", path, error.strerror)
        return False
    return True


def _lines_of(path: Path) -> int:
    with path.open("rb") as file:
        return sum(part.count(b"\n") for part in iter(partial(file.read, _PART_BYTES), b""))


def _write(file: IO[bytes], data: bytes) -> None:
    """Write all of `data`; an unbuffered file may write less per call."""
    view = memoryview(data)
    while view:
        if not (written := file.write(view)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]
