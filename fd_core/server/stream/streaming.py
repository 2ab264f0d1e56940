"""The answer to a generation request, streamed or whole, as one ASGI response that owns the work behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Final, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from fd_core.disagg.ticket import OUTCOME_HEADER
from fd_core.http.access.usage import USAGE_HEADER, usage_comment
from fd_core.http.errors import ApiError, to_api_error
from fd_core.server.schemas.responses import Usage
from fd_core.server.state.state import ServerState
from fd_core.server.stream.generation import ChoiceStream, Generation
from fd_core.server.stream.response_format import AnswerFormat, CollectedText

_LARGE_BYTES: Final = 1 << 20
_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_USAGE_HEADER: Final = USAGE_HEADER.lower().encode()
_LONG_BYTES: Final = 8192
"""What a shorter body asks for is read before anybody could leave."""


class GenerationResponse(Response):
    """Generates and answers. The engine's work begins and ends within `__call__`, so nothing can be left behind.

    The status goes out with the first token: whatever fails before is answered with a proper HTTP status and may be
    tried again elsewhere. Later failures become an `error` event, and no `[DONE]` follows.
    """

    def __init__(
        self, state: ServerState, response_format: AnswerFormat, stream: bool, headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers=headers)
        self._state = state
        self._format = response_format
        self._stream = stream
        self._extra = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate, and send the answer unless the client left."""
        if not self._stream:
            await self._send_whole(scope, receive, send)
            return
        response_format, job = self._format, self._format.job
        headers = {**_STREAM_HEADERS, **self._extra}
        started, sending, preparing = False, asyncio.Lock(), asyncio.Lock()

        async def emit(data: bytes, *, last: bool = False) -> None:
            """Send whole events, the head of the answer before the first; waits while the client reads too slowly."""
            nonlocal started
            async with sending:
                if not started:
                    started = True
                    head = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": head})
                await send({"type": "http.response.body", "body": data, "more_body": not last})

        async def follow(choice: ChoiceStream) -> None:
            usage: Usage | None = None
            begun = False
            while (chunk := await choice.next()) is not None:
                if job.usage_in_events:
                    usage = generation.usage()
                lead = b""
                if not begun:
                    begun = True
                    if choice.prefill is not None:  # tells a router what became of the prefill that it wanted elsewhere
                        headers[OUTCOME_HEADER] = choice.prefill
                    if choice.scores is not None:
                        async with preparing:  # choices of one prompt share what is told of it
                            await response_format.prepare(choice)
                    lead = response_format.first(choice, usage)
                await emit(lead + response_format.event(choice, chunk, usage))

        try:
            async with UntilDisconnect(receive) as client, Generation(self._state, job) as generation:
                await generation.each(follow)
        except Exception as error:  # the stream's outer edge: whatever happened, the client is told
            if not started:
                raise
            await emit(response_format.broken(to_api_error(error)), last=True)
            return
        if client.gone:
            return
        usage = generation.used
        told = b""
        if _USAGE_HEADER in dict(scope["headers"]):  # a router asks what the answer took
            told = usage_comment(usage.prompt_tokens, usage.completion_tokens)
        await emit(told + response_format.last(usage), last=True)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        collected: list[CollectedText] = []

        async def collect(choice: ChoiceStream) -> None:
            chunks = CollectedText(choice)
            collected.append(chunks)
            while (chunk := await choice.next()) is not None:
                chunks.add(chunk)

        async with UntilDisconnect(receive) as client, Generation(self._state, self._format.job) as generation:
            await generation.each(collect)
        if client.gone:
            return
        collected.sort(key=lambda each: each.choice.index)
        for each in collected:
            await self._format.prepare(each.choice)
            await self._format.score(each)
        body = msgspec.json.encode(self._format.whole(collected, generation.used))
        if len(body) > _LARGE_BYTES:
            await asyncio.sleep(0)  # sending copies it once more
        prefill = collected[0].choice.prefill
        headers = self._extra if prefill is None else {**self._extra, OUTCOME_HEADER: prefill}
        await Response(body, headers=headers, media_type="application/json")(scope, receive, send)


T = TypeVar("T")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return what comes of `work`, begun after the body; cancelled, with `ApiError` (499), if the client leaves."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) <= len(str(_LONG_BYTES)) and int(length) <= _LONG_BYTES:
        return await work
    async with UntilDisconnect(request.receive):
        return await work
    raise ApiError(499, "the client went away", code="client_gone")


class UntilDisconnect:
    """Runs a block until it ends or the client disconnects; then `gone` is true and the block was cancelled.

    Works as `asyncio.timeout` does: the task is cancelled once, and the cancellation ends with the block unless
    somebody else cancelled the task as well. The body of the request must have been read before. Leave the block
    before the last part of the answer is sent: servers report the end of an answer as a disconnect too.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._fired = self.gone = False

    async def __aenter__(self) -> UntilDisconnect:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a disconnect can be watched for from within a task only")
        self._task = task
        self._cancelling = task.cancelling()
        self._watch = asyncio.create_task(self._wait())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._watch.cancel()
        if not self._fired:
            return False
        if self._task.uncancel() > self._cancelling:
            return False
        self.gone = True
        return kind is not None and issubclass(kind, asyncio.CancelledError)

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._fired = True
        self._task.cancel()
