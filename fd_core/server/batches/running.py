"""Sends the requests of a file to the application, as a client would, several at a time and without a socket."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Final, NamedTuple, TypeVar

import msgspec
from starlette.types import ASGIApp, Message, Scope

from fd_core.server.batches.lines import BatchAnswer, BatchLine, LineError, answered, failed

T = TypeVar("T")

_PAUSE_SECONDS: Final = 5.0
"""Longest wait before retrying a request that was rejected because the queue was full or the engine down."""
_READ_BYTES: Final = 1 << 20
"""Most bytes read from the file at once; a single line may be longer."""
OWNER: Final = "fd_core.owner"
"""Scope key of internal requests: the value is the owner on whose behalf they run; clients cannot set it."""


class AsgiAnswer(NamedTuple):
    """A complete response."""

    status: int
    headers: dict[str, str]
    body: bytes


async def ask(app: ASGIApp, path: str, body: bytes, request_id: str, owner: str) -> AsgiAnswer:
    """Return the response to a POST with a JSON body, sent on behalf of `owner`."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
        "client": None,
        "server": None,
        OWNER: owner,
    }
    parts: list[bytes] = []
    started: Message = {}
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # a second call blocks until the answer is complete
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in started["headers"]}
    return AsgiAnswer(started["status"], headers, b"".join(parts))


class BatchProgress(msgspec.Struct):
    """Progress of a run, in requests."""

    total: int
    completed: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        """Lines that completed or failed."""
        return self.completed + self.failed


class Pause:
    """Time until which a batch sends nothing, because a limit rejected a request. Clock readings are passed in."""

    def __init__(self) -> None:
        self._until = -math.inf
        self._refusals: Counter[str] = Counter()

    def left(self, now: float) -> float:
        """Return the seconds until the next request may be sent."""
        return max(0.0, self._until - now)

    def retries(self, line: str, answer: AsgiAnswer, now: float) -> bool:
        """Return True if a request should be retried, and pause; limits of the key do not count as rejections."""
        if answer.status not in (429, 503) or "x-should-retry" in answer.headers:
            return False
        wait = answer.headers.get("retry-after", "")
        if answer.status == 429 and wait.isdecimal():
            seconds = min(int(wait[:9]), 300.0)
        else:
            self._refusals[line] += 1
            if self._refusals[line] == 20:
                return False
            seconds = min(_PAUSE_SECONDS, 0.05 * 2 ** self._refusals[line])
        self._until = max(self._until, now + seconds)
        return True


async def run_requests(
    requests: Iterator[BatchLine],
    ask: Callable[[str, bytes, str], Awaitable[AsgiAnswer]],
    take: Callable[[BatchAnswer], None],
    *,
    slots: asyncio.Semaphore,
    known: Collection[int] = frozenset(),
) -> None:
    """Send `requests` except those of the `known` lines, each in one of the `slots` that runs share.

    Answers are passed to `take`.
    """
    loop, pause, tries = asyncio.get_running_loop(), Pause(), Counter[str]()
    lines: deque[BatchLine] = deque()
    running, over, ended = 0, False, asyncio.Event()

    async def one(request: BatchLine) -> None:
        number = tries[request.id]
        try:
            answer = await ask(request.url, request.body, f"{request.id}-{number}" if number else request.id)
        except ConnectionError as error:
            take(failed(request, LineError("no_answer", str(error) or "the response ended before it was complete")))
            return
        if pause.retries(request.id, answer, loop.time()):
            tries[request.id] += 1
            lines.appendleft(request)
        else:
            request_id = answer.headers.get("x-request-id", request.id)
            take(answered(request, answer.status, request_id, body=answer.body))

    def release(_: object) -> None:
        nonlocal running
        running -= 1
        slots.release()
        ended.set()

    async with asyncio.TaskGroup() as group:
        while True:
            if not lines and not over:
                lines.extend(await in_thread(lambda: _read(requests, known)))
                over = not lines
            if not lines:
                if not running:
                    return
                ended.clear()
                await ended.wait()
                continue
            if (error := lines[0].error) is not None:
                take(failed(lines.popleft(), error))
                continue
            if wait := pause.left(loop.time()):
                await asyncio.sleep(wait)
                continue
            await slots.acquire()
            if not lines or pause.left(loop.time()):
                slots.release()
                continue
            running += 1
            # Not in the task: a task that is cancelled before it starts would leak the slot.
            group.create_task(one(lines.popleft())).add_done_callback(release)
            await asyncio.sleep(0)  # so that a rejection by a limit of the key is seen before the next request


async def in_thread(work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Return `work()`, done in another thread; a cancellation sets `stop` and waits for the end of the work."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        await asyncio.wait({task})
        raise


def _read(requests: Iterator[BatchLine], known: Collection[int]) -> list[BatchLine]:
    found, size = list[BatchLine](), 0
    for request in requests:
        if request.number not in known:
            found.append(request)
            size += len(request.body)
            if len(found) == 64 or size >= _READ_BYTES:
                break
    return found
