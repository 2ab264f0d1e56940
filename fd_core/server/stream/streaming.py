"""The answer to a generation request, streamed or whole, as one ASGI response that owns the work behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from fd_core.disagg.ticket import OUTCOME_HEADER
from fd_core.http.access.usage import USAGE_HEADER, usage_comment
from fd_core.http.errors import to_api_error
from fd_core.server.state.state import ServerState
from fd_core.server.stream.disconnect import UntilDisconnect
from fd_core.server.stream.generation import ChoiceStream, Generation
from fd_core.server.stream.response_format import AnswerFormat, CollectedText

__all__ = ["GenerationResponse"]

_LARGE_BYTES: Final = 1 << 20
_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


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
        if self._stream:
            told = USAGE_HEADER.lower().encode() in dict(scope["headers"])
            await self._send_stream(receive, send, told)
            return
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
        body = msgspec.json.encode(self._format.whole(collected, generation.usage()))
        if len(body) > _LARGE_BYTES:
            await asyncio.sleep(0)  # sending copies it once more
        headers = self._extra | _prefill_header(collected[0].choice)
        await Response(body, headers=headers, media_type="application/json")(scope, receive, send)

    async def _send_stream(self, receive: Receive, send: Send, usage_told: bool) -> None:
        """Stream; with `usage_told` a comment tells a router what the answer took."""
        response_format = self._format
        events, preparing = _Events(send, self._extra), asyncio.Lock()

        async def follow(choice: ChoiceStream) -> None:
            chunk = await choice.next()
            events.headers.update(_prefill_header(choice))
            if chunk is not None:
                async with preparing:  # choices of one prompt share what is told of it
                    await response_format.prepare(choice)
                await events.send(response_format.first(choice) + response_format.event(choice, chunk))
            while (chunk := await choice.next()) is not None:
                await events.send(response_format.event(choice, chunk))

        try:
            async with UntilDisconnect(receive) as client, Generation(self._state, self._format.job) as generation:
                if response_format.job.usage_in_events:
                    response_format.usage_so_far = generation.usage
                await generation.each(follow)
        except Exception as error:  # the stream's outer edge: whatever happened, the client is told
            if not events.started:
                raise
            await events.send(response_format.broken(to_api_error(error)), last=True)
            return
        if client.gone:
            return
        usage = generation.usage()
        told = usage_comment(usage.prompt_tokens, usage.completion_tokens) if usage_told else b""
        await events.send(told + response_format.last(usage), last=True)


def _prefill_header(choice: ChoiceStream) -> dict[str, str]:
    """Tell a router what became of the prefill that it wanted elsewhere."""
    return {} if choice.prefill is None else {OUTCOME_HEADER: choice.prefill}


class _Events:
    """Sends server-sent events; the head of the answer goes with the first."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self.headers = {**_STREAM_HEADERS, **headers}
        """Go out with the first event."""
        self._one_at_a_time = asyncio.Lock()
        self.started = False

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Send whole events, and end the answer after the last; waits while the client reads too slowly."""
        async with self._one_at_a_time:
            if not self.started:
                self.started = True
                headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
