"""What a client asks, as far as choosing a worker needs it. Everything else is for the worker to judge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from aiohttp import web

from fd_core.errors import FdError
from fd_core.router.selection import RouteRequest
from fd_core.server.errors import ApiError
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.reading import reading_of
from fd_core.text.tokenizer import Tokenizer
from fd_core.types import IntArray

__all__ = ["BYTES_PER_TOKEN", "PromptReader", "read_body"]

BYTES_PER_TOKEN: Final = 4
"""What a token is taken to be where no tokenizer counts."""
_INLINE_BYTES: Final = 8192
"""Longer requests are tokenized on a thread: the event loop feeds every stream."""
_ROLES: Final = {"developer": "system"}
"""As the server reads them."""


class _Body(msgspec.Struct):
    """The fields that matter here, of whatever type they are."""

    prompt: Any = None
    messages: Any = None
    input: Any = None
    add_special_tokens: Any = None
    add_generation_prompt: Any = None
    chat_template_kwargs: Any = None
    session_id: Any = None
    user: Any = None
    cache_salt: Any = None
    model: Any = None


_decoder: Final = msgspec.json.Decoder(_Body)


async def read_body(request: web.BaseRequest, limit: int) -> bytes:
    """Return the body. Raises `ApiError` (413) beyond `limit` bytes, before they are kept, and 400 if it breaks off."""
    announced = request.content_length
    if announced is not None and announced > limit:
        raise _too_large(limit)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    parts: list[bytes] = []
    size = 0
    try:
        while part := await request.content.readany():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except web.RequestPayloadError as error:
        raise ApiError(400, "the body broke off or is not framed as announced", code="invalid_body") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompts of one request as token ids."""

    first: Sequence[int]
    """Decides which prefix is looked for."""
    length: int
    """Tokens of all."""


class PromptReader:
    """Turns bodies into what the router chooses by. It never yields an empty prompt, and it never refuses a body."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        """Without a tokenizer prompts are compared by the bytes of their text."""
        self._tokenizer = tokenizer
        self._template = template
        self.reading = None if tokenizer is None else reading_of(tokenizer, template)
        """Names how text becomes tokens; None if it does not."""
        self._worker = ThreadPoolExecutor(1, "fdcore-text")

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def read(self, body: bytes, session: str | None = None) -> RouteRequest:
        """Return what the router is asked for a body; `session` comes from a header and wins over the body's."""
        if self._tokenizer is None or len(body) <= _INLINE_BYTES:
            return self._read(body, session)
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._read, body, session)

    @staticmethod
    def model(body: bytes) -> str | None:
        """Return the name of the model that a body asks for, of which nothing is computed."""
        try:
            return _text(_decoder.decode(body).model)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def _read(self, body: bytes, session: str | None) -> RouteRequest:
        try:
            asked = _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return _by_bytes(body, session, "")
        session = session or _text(asked.session_id) or _text(asked.user)
        salt = _text(asked.cache_salt) or ""
        prompts = self._prompts(asked) if self._tokenizer is not None else _ids(asked.prompt)
        if prompts is None or not prompts.first:
            return _by_bytes(_bytes_of(asked) or body, session, salt, _text(asked.model))
        tokens = np.fromiter(prompts.first, np.int32, len(prompts.first))
        return RouteRequest(tokens, session, salt, prompts.length, _text(asked.model))

    def _prompts(self, asked: _Body) -> _Prompts | None:
        """Tokenize as a worker would; None for what only a worker can refuse properly."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None
        try:
            if isinstance(asked.messages, list):
                return self._conversation(tokenizer, asked)
            prompt = asked.prompt if asked.prompt is not None else asked.input
            special = asked.add_special_tokens is not False
            return _ids(prompt) or _encoded(prompt, lambda text: tokenizer.encode(text, add_special=special))
        except (FdError, OverflowError, TypeError):
            return None

    def _conversation(self, tokenizer: Tokenizer, asked: _Body) -> _Prompts | None:
        if self._template is None:
            return None
        turns = [_turn(message) for message in asked.messages]
        more = asked.chat_template_kwargs if isinstance(asked.chat_template_kwargs, dict) else {}
        text = self._template.render(turns, None, asked.add_generation_prompt is not False, **more)
        ids = tokenizer.encode(text, add_special=False)
        return _Prompts(ids, len(ids))


def _turn(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise TypeError("a message is an object")
    role = message.get("role")
    return {**message, "role": _ROLES.get(role, role) if isinstance(role, str) else role}


def _ids(prompt: Any) -> _Prompts | None:
    """Read a list of ids, or lists of them; None for anything else."""
    if not isinstance(prompt, list) or not prompt:
        return None
    given = prompt if all(isinstance(each, list) for each in prompt) else [prompt]
    for ids in given:
        if not all(type(each) is int and 0 <= each < 2**31 for each in ids):
            return None
    return _Prompts(given[0], sum(map(len, given)))


def _encoded(prompt: Any, encode: Callable[[str], list[int]]) -> _Prompts | None:
    """Tokenize a text, or texts; None for anything else."""
    texts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        return None
    every = [encode(text) for text in texts]
    return _Prompts(every[0], sum(map(len, every)))


def _bytes_of(asked: _Body) -> bytes:
    """Return the text that begins alike where prompts begin alike, whatever other fields say."""
    if isinstance(asked.messages, list):
        return b"".join(map(_message_bytes, asked.messages))
    prompt = asked.prompt if asked.prompt is not None else asked.input
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "replace")
    return msgspec.json.encode(prompt) if prompt is not None else b""


def _message_bytes(message: Any) -> bytes:
    return msgspec.json.encode(message, order="sorted") + b"\n"


def _by_bytes(data: bytes, session: str | None, salt: str, model: str | None = None) -> RouteRequest:
    tokens: IntArray = np.frombuffer(data or b"\0", np.uint8).astype(np.int32)
    return RouteRequest(tokens, session, salt, max(1, len(data) // BYTES_PER_TOKEN), model, tokenized=False)


def _text(value: Any) -> str | None:
    return value[:256] if isinstance(value, str) and value else None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than the {limit:,} bytes allowed", code="body_too_large")
