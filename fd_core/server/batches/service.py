"""Runs the batches of a store one after the other, beside the requests of clients, and goes on after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp

from fd_core.errors import FdError
from fd_core.server.batches.asgi import AsgiAnswer, ask
from fd_core.server.batches.lines import BatchAnswer, BatchLine, read_requests
from fd_core.server.batches.output import AnswerFile
from fd_core.server.batches.running import run_requests
from fd_core.server.batches.store import BatchCounts, BatchError, BatchErrors, BatchStore, StoredBatch
from fd_core.server.errors import ApiError

__all__ = ["MOST_REQUESTS", "BatchService"]

log = logging.getLogger(__name__)

MOST_REQUESTS: Final = 50_000
"""Requests that one batch may have."""
_MOST_ERRORS: Final = 100
_SAVE_SECONDS: Final = 1.0


class BatchService:
    """Owner of the store and of the task that works on its batches; used from one event loop."""

    def __init__(self, app: ASGIApp, folder: Path, limit: int, *, longest: int, at_once: int) -> None:
        """`limit` bounds the bytes of all files, `longest` those of a line; `at_once` requests are on their way.

        The folder is made, and taken from other servers, when the store is first used.
        """
        self._app = app
        self._folder = folder
        self._limit = limit
        self._longest = longest
        self._at_once = at_once
        self._store: BatchStore | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def store(self) -> BatchStore:
        """The store. Raises `ApiError` (503) if another server has it."""
        if self._store is None:
            self._store = BatchStore(self._folder, self._limit)
            self._task = asyncio.create_task(self._work(self._store))
        return self._store

    def resume(self) -> None:
        """Go on with what an earlier server left, if it left anything."""
        if self._folder.exists():
            try:
                _ = self.store
            except ApiError as error:
                log.warning(
                    "no files and batches here, everything else is served: %s (%s)", error.message, self._folder
                )

    def begin(self, batch: StoredBatch, owner: str) -> None:
        """Take a new batch of an owner's."""
        self.store.own(batch.id, owner)
        self.store.save(batch)
        self._news.set()

    def cancel(self, batch_id: str, owner: str) -> StoredBatch:
        """Ask for the end of a batch of an owner's: requests on their way are answered, no others begin."""
        batch = self.store.batch(batch_id, owner)
        if not batch.ended and batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            self.store.save(batch)
            self._news.set()
        return batch

    async def close(self) -> None:
        """Stop working; a batch that is not over goes on when a server takes the store again."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._store is not None:
            self._store.close()

    async def _work(self, store: BatchStore) -> None:
        while True:
            batch = next((each for each in store.batches.values() if not each.ended), None)
            if batch is None:
                self._news.clear()
                await self._news.wait()
                continue
            try:
                await self._run(store, batch)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this batch and not the others
                reason = str(error) if isinstance(error, FdError | OSError) else type(error).__name__
                log.error("the batch %s failed: %s", batch.id, reason)
                _fail(batch, [BatchError("server_error", f"the batch could not be run: {reason}")])
                store.save(batch)

    async def _run(self, store: BatchStore, batch: StoredBatch) -> None:
        """Run a batch from wherever it is to its end."""
        source = store.content(batch.input_file_id)
        if batch.status == "validating":
            errors, total = await asyncio.to_thread(_validate, source, self._longest, batch.endpoint)
            batch.request_counts.total = total
            if errors:
                _fail(batch, errors)
            elif batch.status == "validating":  # it may have been cancelled meanwhile
                batch.status, batch.in_progress_at = "in_progress", int(time.time())
            store.save(batch)
            if batch.ended:
                return
        with _answers(store, batch, "output") as good, _answers(store, batch, "errors") as bad:
            await self._send(store, batch, source, good, bad)
            self._finish(store, batch, good, bad)

    async def _send(
        self, store: BatchStore, batch: StoredBatch, source: Path, good: AnswerFile, bad: AnswerFile
    ) -> None:
        counts = batch.request_counts = BatchCounts(batch.request_counts.total, len(good.known), len(bad.known))
        room = store.limit - store.used
        saved = time.monotonic()

        def take(answer: BatchAnswer) -> None:
            nonlocal saved
            (good if answer.ok else bad).write(answer)
            if answer.ok:
                counts.completed += 1
            else:
                counts.failed += 1
            if good.size + bad.size > room:
                raise OSError("its answers go beyond --batch-store-limit")
            if time.monotonic() - saved >= _SAVE_SECONDS:
                saved = time.monotonic()
                store.save(batch)

        async def sent(path: str, body: bytes, request_id: str) -> AsgiAnswer:
            return await ask(self._app, path, body, f"{batch.id}.{request_id}", store.owner(batch.id))

        with source.open("rb") as file:
            try:
                await run_requests(
                    read_requests(file, self._longest, batch.endpoint),
                    sent,
                    take,
                    at_once=self._at_once,
                    known={*good.known, *bad.known},
                    going_on=lambda: batch.status == "in_progress" and time.time() < batch.expires_at,
                )
            except ExceptionGroup as group:
                raise group.exceptions[0] from None

    def _finish(self, store: BatchStore, batch: StoredBatch, good: AnswerFile, bad: AnswerFile) -> None:
        """Make the answers files, and say how the batch ended."""
        now, counts = int(time.time()), batch.request_counts
        left = counts.completed + counts.failed < counts.total
        batch.finalizing_at = now
        for answers, field in ((good, "output_file_id"), (bad, "error_file_id")):
            if answers.size:
                answers.finish()
                setattr(batch, field, store.adopt(answers.path, answers.path.name, store.owner(batch.id)).id)
            else:
                answers.discard()
        if batch.status == "cancelling":
            batch.status, batch.cancelled_at = "cancelled", now
        elif left:
            batch.status, batch.expired_at = "expired", now
        else:
            batch.status, batch.completed_at = "completed", now
        store.save(batch)


def _answers(store: BatchStore, batch: StoredBatch, what: str) -> AnswerFile:
    """Open the answers of a batch; those of a server that died while it made them a file are taken up as well."""
    path = store.folder / f"{batch.id}_{what}.jsonl"
    if path.exists():
        path.replace(path.with_name(f"{path.name}.partial"))
    return AnswerFile(path)


def _validate(source: Path, longest: int, endpoint: str) -> tuple[list[BatchError], int]:
    """Return what is wrong with the lines of a file, and how many requests it has."""
    errors: list[BatchError] = []
    total = 0
    with source.open("rb") as file:
        request: BatchLine
        for request in read_requests(file, longest, endpoint):
            total += 1
            if request.error is not None:
                errors.append(BatchError(request.error.code, request.error.message, request.number))
            if len(errors) == _MOST_ERRORS:
                break
            if total > MOST_REQUESTS:
                return [BatchError("too_many_requests", f"a batch may have {MOST_REQUESTS:,} requests")], total
    if not total:
        errors.append(BatchError("empty_file", "the file has no requests"))
    return errors, total


def _fail(batch: StoredBatch, errors: list[BatchError]) -> None:
    batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), BatchErrors(errors)
