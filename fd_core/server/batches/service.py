"""Runs the batches of a store alongside the requests of clients, keys in turn, and resumes after a restart."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp

from fd_core.http.errors import ApiError
from fd_core.http.supervision import Supervisor, cancelled, failure_reason
from fd_core.server.batches.lines import AnswerFile, BatchAnswer, read_requests
from fd_core.server.batches.running import AsgiAnswer, ask, in_thread, run_requests
from fd_core.server.batches.store import ANSWERS, BatchCounts, BatchError, BatchErrors, BatchStore, StoredBatch

log = logging.getLogger(__name__)

MOST_REQUESTS: Final = 50_000


class BatchService:
    """Owner of the store and of one task for each key, on one event loop: round-robin over keys, FIFO within a key."""

    def __init__(
        self,
        app: ASGIApp,
        open_store: Callable[[], BatchStore],
        folder: Path,
        supervisor: Supervisor,
        *,
        longest: int,
        at_once: int,
    ) -> None:
        """`longest` bounds a line's bytes, `at_once` the requests in flight. The store is opened at first use."""
        self._app = app
        self._open_store = open_store
        self._folder = folder
        self._supervisor = supervisor
        self._longest = longest
        self._slots = asyncio.Semaphore(at_once)
        self._opening = asyncio.Lock()
        self._store: BatchStore | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._resuming: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Timeout] = {}
        """Timeout whose expiry ends the work on a batch, by batch id."""

    async def open(self) -> BatchStore:
        """Return the store. Raises `ApiError` (503) if another server has locked it, or the disk fails."""
        async with self._opening:
            return self._store or self._opened(await in_thread(self._open_store))

    def resume(self) -> None:
        """Resume the unfinished batches of an earlier server. Called before the first request."""
        if not self._folder.exists():
            return
        try:
            self._opened(self._open_store())
        except ApiError as error:
            log.warning(
                "files and batches are disabled, all other endpoints work: %s (%s)", error.message, self._folder
            )
            self._resuming = self._supervisor.start("batch_store", self.open)

    async def begin(self, batch: StoredBatch, owner: str) -> None:
        """Enqueue a new batch of an owner. Raises `ApiError` (429, 503)."""
        store = await self.open()
        store.begin(batch, owner)
        self._work_for(store, owner)

    async def cancel(self, batch_id: str, owner: str) -> StoredBatch:
        """Cancel a batch of an owner: requests in flight are aborted, the answers so far become its output files."""
        store = await self.open()
        batch = store.batch(batch_id, owner)
        if batch.status not in ("validating", "in_progress"):
            return batch
        batch = store.save(batch_id, status="cancelling", cancelling_at=int(time.time()))
        if (work := self._running.get(batch_id)) is not None:
            if not work.expired():
                work.reschedule(asyncio.get_running_loop().time())
            return batch
        return store.conclude(batch_id)

    async def close(self) -> None:
        """Stop working; an unfinished batch is resumed when a server opens the store again."""
        await cancelled(*self._tasks.values(), *([] if self._resuming is None else [self._resuming]))
        if self._store is not None:
            self._store.close()

    def _opened(self, store: BatchStore) -> BatchStore:
        self._store = store
        for owner in store.waiting:
            self._work_for(store, owner)
        return store

    def _work_for(self, store: BatchStore, owner: str) -> None:
        if owner not in self._tasks:
            self._tasks[owner] = self._supervisor.start("batches", partial(self._work, store, owner), part=owner)

    async def _work(self, store: BatchStore, owner: str) -> None:
        """Run the batches of an owner until none is left. Raises `OSError` if the disk fails: a retry resumes."""
        while (batch := store.next_batch(owner)) is not None:
            errors = None
            try:
                if batch.status in ("validating", "in_progress"):
                    errors = await self._run(store, batch)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - any error ends this batch and not the others
                reason = failure_reason(error)
                log.error("the batch %s failed: %s", batch.id, reason)
                code = error.code or "server_error" if isinstance(error, ApiError) else "server_error"
                errors = BatchErrors([BatchError(code, f"the batch failed: {reason}")])
            store.conclude(batch.id, errors)
        del self._tasks[owner]

    async def _run(self, store: BatchStore, batch: StoredBatch) -> BatchErrors | None:
        """Run a batch from its current state until it ends, is cancelled or expires; return its errors."""
        left = batch.expires_at - time.time()
        try:
            async with asyncio.timeout(max(0.0, left)) as self._running[batch.id]:
                source = store.content(batch.input_file_id)
                if not source.exists():
                    return BatchErrors([BatchError("file_not_found", "the input file no longer exists on disk")])
                if batch.status == "validating":
                    stop = threading.Event()
                    errors, total = await in_thread(
                        lambda: _validate(source, self._longest, batch.endpoint, stop=stop), stop
                    )
                    batch = store.save(
                        batch.id,
                        status="validating" if errors else "in_progress",
                        in_progress_at=None if errors else int(time.time()),
                        request_counts=BatchCounts(total),
                    )
                    if errors:
                        return BatchErrors(errors)
                await self._answer(store, batch, source)
        except TimeoutError:
            if not self._running[batch.id].expired():
                raise
        finally:
            del self._running[batch.id]
        return None

    async def _answer(self, store: BatchStore, batch: StoredBatch, source: Path) -> None:
        owner = store.batches.owner(batch.id)

        async def sent(path: str, body: bytes, request_id: str) -> AsgiAnswer:
            return await ask(self._app, path, body, request_id=f"{batch.id}.{request_id}", owner=owner)

        opened = [
            partial(AnswerFile, store.answers(batch, kind), partial(store.reserve_answers, batch.id, kind))
            for kind in ANSWERS
        ]
        with await in_thread(opened[0]) as good, await in_thread(opened[1]) as bad, source.open("rb") as file:
            for kind, answers in zip(ANSWERS, (good, bad), strict=True):
                store.recount_answers(batch.id, kind, answers.size)
            counts = batch.request_counts
            counts.completed, counts.failed = len(good.known), len(bad.known)

            def take(answer: BatchAnswer) -> None:
                (good if answer.ok else bad).write(answer)
                counts.completed += answer.ok
                counts.failed += not answer.ok

            requests = read_requests(file, self._longest, batch.endpoint)
            try:
                await run_requests(requests, sent, take, slots=self._slots, known={*good.known, *bad.known})
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            for answers in (good, bad):
                await in_thread(answers.sync)


def _validate(source: Path, longest: int, endpoint: str, stop: threading.Event) -> tuple[list[BatchError], int]:
    """Return the errors in the lines of a file, and its number of requests; `stop` ends the work."""
    errors: list[BatchError] = []
    total = 0
    with source.open("rb") as file:
        for request in read_requests(file, longest, endpoint):
            total += 1
            if request.error is not None:
                errors.append(BatchError(request.error.code, request.error.message, request.number))
            if len(errors) == 100 or stop.is_set():
                break
            if total > MOST_REQUESTS:
                return [BatchError("too_many_requests", f"the batch has more than {MOST_REQUESTS:,} requests")], total
    if not total:
        errors.append(BatchError("empty_file", "the file has no requests"))
    return errors, total
