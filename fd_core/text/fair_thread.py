"""A thread that serves clients in turn, so that a client with much work does not delay others for long."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Final, TypeVar

CLIENT: Final[ContextVar[str]] = ContextVar("client", default="")
"""Client of the current task: a name derived from its key, or from its address if it has no key."""

T = TypeVar("T")


class FairThread:
    """One thread. The first job of each waiting client runs before the second of any."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        """Work by client, the client whose turn is next at the beginning."""

    async def run(self, work: Callable[[], T]) -> T:
        """Return `work()` in the turn of the `CLIENT`; a job cancelled before its turn does not run."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(CLIENT.get(), deque()).append((future, work))
        self._thread.submit(self._take)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread and cancel waiting jobs."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for line in self._waiting.values():
                for future, _ in line:
                    future.cancel()

    def _take(self) -> None:
        """Run the job whose turn it is; called once per submitted job."""
        with self._lock:
            client, line = self._waiting.popitem(last=False)
            future, work = line.popleft()
            if line:
                self._waiting[client] = line
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # a Rust panic is not an Exception; it is raised in the waiting caller
            future.set_exception(error)
