"""A worker that computes nothing: OpenAI's API in front of a simulated engine, as fast as one Python process allows.

    python -m harness.routing.fake_worker '{"prefill_tps": 20000}'

Takes its settings as JSON, binds a free loopback port and prints it. With `prefill_tps` 0 answers go out at once. Else
a prompt waits for one of `slots`, then for its turn to be prefilled (one at a time, the tokens that the prefix cache
does not hold), then each token takes `decode_s`. GET /stats returns the cache's counters, POST /reset clears it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import uvloop

from .cache import PrefixCache, tokens_of
from .http import HEAD_END, content_length, dechunked

MODEL = "simulated"
EVENT_TEXT = "word "


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """Speed of the engine and capacity of its cache."""

    prefill_tps: float = 0.0
    decode_s: float = 0.0
    slots: int = 16
    cache_blocks: int = 4096


class _Message(msgspec.Struct):
    role: str
    content: Any = ""


class _Body(msgspec.Struct):
    messages: list[_Message] = []
    prompt: Any = ""
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Name that a router may give `max_tokens`."""


_bodies = msgspec.json.Decoder(_Body)


def text_of(body: _Body) -> str:
    """Return the prompt as the worker's chat template would write it."""
    if body.messages:
        return "".join(f"<|{each.role}|>{each.content}<|end|>" for each in body.messages)
    return body.prompt if isinstance(body.prompt, str) else msgspec.json.encode(body.prompt).decode()


def text_of_messages(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the prompt of a conversation."""
    return text_of(msgspec.convert({"messages": list(messages)}, _Body))


def _event(finish: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": "" if finish else EVENT_TEXT}, "finish_reason": finish}
    chunk = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [choice]}
    return _chunked(b"data: " + msgspec.json.encode(chunk) + b"\n\n")


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _json(value: object, status: bytes = b"200 OK") -> bytes:
    body = msgspec.json.encode(value)
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_TOKEN, _LAST, _END = _event(None), _event("length"), _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "bench"}]}
_FACTS: dict[bytes, object] = {
    b"/health": {"status": "ok"},
    b"/health_generate": {"status": "ok"},
    b"/v1/models": _MODELS,
    b"/get_model_info": {"model_path": MODEL, "is_generation": True},
    b"/model_info": {"model_path": MODEL, "is_generation": True},
    b"/get_server_info": {"model_path": MODEL, "served_model_name": MODEL, "tp_size": 1, "dp_size": 1},
    b"/server_info": {"model_path": MODEL, "served_model_name": MODEL, "tp_size": 1, "dp_size": 1},
    b"/version": {"version": "0"},
}


def _whole(prompt_tokens: int, tokens: int) -> bytes:
    message = {"role": "assistant", "content": EVENT_TEXT * tokens}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    answer = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": MODEL}
    return _json({**answer, "choices": [choice], "usage": usage})


class Engine:
    """Simulated engine of one worker."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cache = PrefixCache(settings.cache_blocks)
        self._slots = asyncio.Semaphore(settings.slots)
        self._prefill = asyncio.Lock()
        self.running = 0
        self.most_running = 0

    async def generate(self, text: str, tokens: int, emit: Callable[[], None]) -> None:
        """Call `emit` for each token when it is due."""
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async with self._slots:
                async with self._prefill:
                    await asyncio.sleep(self.cache.compute(text) / self.settings.prefill_tps)
                emit()
                for _ in range(tokens - 1):
                    await asyncio.sleep(self.settings.decode_s)
                    emit()
        finally:
            self.running -= 1

    def stats(self) -> dict[str, object]:
        """Return the counters of the cache and the peak number of running requests."""
        seen = self.cache.seen
        return {name: getattr(seen, name) for name in seen.__slots__} | {"most_running": self.most_running}

    def reset(self) -> None:
        """Forget everything."""
        self.cache.clear()
        self.most_running = self.running


class Connection(asyncio.Protocol):
    """One connection: request after request, each answered before the next is read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own are not derived from it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            self._next()
        except ValueError:  # not HTTP/1.1, or not JSON: a probe for another protocol
            self._transport.close()

    def _next(self) -> None:
        if self._task is not None:
            return
        end = self._buffer.find(HEAD_END)
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        start = end + len(HEAD_END)
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            found = dechunked(self._buffer, start)
            if found is None:
                return
            body, body_end = found
        else:
            body_end = start + content_length(lower)
            if len(self._buffer) < body_end:
                return
            body = bytes(self._buffer[start:body_end])
        del self._buffer[:body_end]
        method, path, _ = head.split(b"\r\n", 1)[0].split(b" ", 2)
        self._answer(method, path.split(b"?", 1)[0], body)

    def _answer(self, method: bytes, path: bytes, body: bytes) -> None:
        write = self._transport.write
        if path in (b"/v1/chat/completions", b"/v1/completions"):
            asked = _bodies.decode(body)
            tokens = asked.max_tokens or asked.max_completion_tokens or 1
            if self._engine.settings.prefill_tps:
                self._task = self._loop.create_task(self._simulate(asked, tokens))
            elif asked.stream:
                write(_STREAM_HEAD + _TOKEN)
                self._loop.call_soon(self._more, tokens - 1)
            else:
                write(_whole(tokens_of(text_of(asked)), tokens))
        elif path == b"/stats":
            write(_json(self._engine.stats()))
        elif path == b"/reset" and method == b"POST":
            self._engine.reset()
            write(_json({}))
        elif (fact := _FACTS.get(path)) is not None:
            write(_json(fact))
        else:
            write(_json({"error": {"message": "nothing here", "type": "not_found"}}, b"404 Not Found"))

    def _more(self, left: int) -> None:
        """Write the next event by itself: each passes the router alone."""
        if left > 0:
            self._transport.write(_TOKEN)
            self._loop.call_soon(self._more, left - 1)
        else:
            self._transport.write(_LAST + _END)

    async def _simulate(self, asked: _Body, tokens: int) -> None:
        text = text_of(asked)
        if asked.stream:
            self._transport.write(_STREAM_HEAD)
            await self._engine.generate(text, tokens, lambda: self._transport.write(_TOKEN))
            self._transport.write(_LAST + _END)
        else:
            await self._engine.generate(text, tokens, lambda: None)
            self._transport.write(_whole(tokens_of(text), tokens))
        self._task = None
        self._next()


async def _serve(settings: Settings) -> None:
    engine = Engine(settings)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1] if len(sys.argv) > 1 else "{}", type=Settings)
    uvloop.run(_serve(given))
