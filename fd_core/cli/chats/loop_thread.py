"""An event loop in a thread, so that a terminal command can block on keyboard input while an engine runs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Self, TypeVar

T = TypeVar("T")

_WAKE_SECONDS = 0.25
"""Seconds between checks for a signal that the system delivered to another thread."""


class LoopThread:
    """Runs coroutines for the thread that owns it; Ctrl-C there cancels the current wait."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fdcore-loop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns; if the wait is interrupted, cancel it and wait for its end."""
        ended = threading.Event()
        started: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            task.add_done_callback(lambda _: ended.set())
            started.append(task)

        def cancel() -> None:
            if started:
                started[0].cancel()
            else:
                work.close()
                ended.set()

        try:
            self._loop.call_soon_threadsafe(begin)
            while not ended.wait(_WAKE_SECONDS):
                pass
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            ended.wait()
            raise
        return started[0].result()

    @contextlib.contextmanager
    def entered(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enter an asynchronous context manager for a block."""
        value = self.run(manager.__aenter__())
        try:
            yield value
        finally:
            self.run(manager.__aexit__(None, None, None))

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of an asynchronous generator and close it, however the loop over them ends."""
        try:
            while True:
                try:
                    yield self.run(items.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            self.run(items.aclose())
