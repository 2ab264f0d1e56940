"""A small client of OpenAI-compatible servers, for commands that use a running one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from fd_core.errors import ConfigError, FdError

T = TypeVar("T")
_LONGEST_LINE = 1 << 20
_LONGEST_LIST = 16 << 20
"""Largest list of models, in bytes; the rest is not read."""
_LIST_SECONDS = 30.0
"""Timeout for the list of models, in seconds; an answer has no timeout."""


class ServedModel(msgspec.Struct):
    """One of the models that a server lists."""

    id: str
    max_model_len: int | None = None
    root: str | None = None


class _ServedModels(msgspec.Struct):
    data: list[ServedModel]


class ServerAnswer(FdError):
    """A server rejected a request, sent an incomplete answer or is unreachable."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a streamed answer."""

    text: str
    at: float
    """Arrival time, in seconds of `time.perf_counter`."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """Set with `completion_tokens` in the piece that carries the usage."""
    completion_tokens: int | None = None


def base_url(text: str) -> str:
    """Return the address of a server without a trailing `/` or `/v1`. Raises `ConfigError`."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{text!r} is not the URL of a server", field="--url", hint="for example http://127.0.0.1:8000"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class ApiClient:
    """A connection to one server; an asynchronous context manager."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = base_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Self:
        """Open the connection pool, which is unbounded."""
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            read_bufsize=_LONGEST_LINE,
            trust_env=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """Return the name of the first of the models served. Raises `ServerAnswer`."""
        return (await self.models())[0].id

    async def models(self) -> list[ServedModel]:
        """Return the models served, at least one. Raises `ServerAnswer`."""
        models = (await self.get("/v1/models", _ServedModels)).data
        if not models:
            raise FdError("the server lists no models", field=self.url)
        return models

    async def get(self, path: str, kind: type[T]) -> T:
        """Return what the server answers at `path`. Raises `ServerAnswer`."""
        try:
            wait = aiohttp.ClientTimeout(total=_LIST_SECONDS)
            async with self._session.get(f"{self.url}{path}", timeout=wait) as response:
                body = await _read_up_to(response.content, _LONGEST_LIST)
                if response.status != 200:
                    raise _refused(response.status, body, self.url)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise ServerAnswer("the server's response is not OpenAI-compatible", field=self.url) from error

    async def stream(self, path: str, request: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Send a completion or chat request and return the answer's pieces. Raises `ServerAnswer`."""
        body = msgspec.json.encode({**request, "stream": True, "stream_options": {"include_usage": True}})
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(f"{self.url}{path}", data=body, headers=headers) as response:
                if response.status != 200:
                    raise _refused(response.status, await _read_up_to(response.content, _LONGEST_LINE), self.url)
                async for line in response.content:
                    at = time.perf_counter()
                    name, _, value = line.strip().partition(b":")
                    if name != b"data":
                        continue
                    if value.strip() == b"[DONE]":
                        return
                    yield _chunk(value, at, self.url)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        except ValueError as error:
            raise ServerAnswer("a line of the answer is too long", field=self.url) from error
        raise ServerAnswer("the answer ended before it was complete", field=self.url)

    def _unreachable(self, error: Exception) -> ServerAnswer:
        reason = str(error) or type(error).__name__
        if isinstance(error, asyncio.TimeoutError):
            reason = "timeout"
        elif isinstance(error, aiohttp.ClientConnectorDNSError):
            reason = "the host name is unknown"
        elif isinstance(error, aiohttp.ClientConnectorError) and error.errno:
            reason = os.strerror(error.errno).lower()
        return ServerAnswer(f"cannot connect to the server: {reason}", field=self.url, hint="check that it is running")


def _chunk(data: bytes, at: float, url: str) -> Chunk:
    try:
        event = msgspec.json.decode(data)
        if "error" in event:
            raise ServerAnswer(_refusal(None, data), field=url)
        usage = event.get("usage") or {}
        choice = event["choices"][0] if event.get("choices") else {}
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        return Chunk(str(text), at, choice.get("finish_reason"), *counts)
    except (msgspec.DecodeError, AttributeError, TypeError, LookupError) as error:
        raise ServerAnswer("the answer is not a stream of OpenAI events", field=url) from error


def _refused(status: int, body: bytes, url: str) -> ServerAnswer:
    hint = "set the server's key with --api-key-file FILE or in FD_API_KEY" if status == 401 else None
    return ServerAnswer(_refusal(status, body), field=url, hint=hint)


def _refusal(status: int | None, body: bytes) -> str:
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, TypeError, LookupError):
        message = body[:200].decode(errors="replace").strip() or "empty response"
    return message if status is None else f"HTTP status {status}: {message}"


async def _read_up_to(content: aiohttp.StreamReader, limit: int) -> bytes:
    """Return all of a body, or its first `limit` bytes."""
    parts: list[bytes] = []
    while limit > 0 and (part := await content.read(limit)):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)
