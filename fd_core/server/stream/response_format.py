"""Formats of the API families, events as bytes or whole values, and the ASGI response that sends them.

The Responses and the Messages API show an answer as blocks: runs of reasoning, of content, or one tool call, each
opened, filled and closed in turn.
"""

from __future__ import annotations

import abc
import asyncio
import json
import re
import secrets
import string
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from fd_core.disagg.ticket import OUTCOME_HEADER
from fd_core.http.access.record import USAGE_HEADER, usage_comment
from fd_core.http.errors import ApiError, to_api_error
from fd_core.server.preprocess.jobs import Job
from fd_core.server.schemas import responses
from fd_core.server.state import ServerState
from fd_core.server.stream.generation import ChoiceStream, Generation, TextChunk
from fd_core.text.detokenizer import IncrementalDetokenizer
from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Content, Event, ReasoningDelta
from fd_core.text.tokenizer import Tokenizer
from fd_core.types import TokenLogprobs

_DONE: Final = b"data: [DONE]\n\n"
_encode = msgspec.json.encode
_SLICE: Final = 128
"""Tokens whose log-probabilities are encoded without yielding to the event loop."""
_LINE_BREAKS: Final = re.compile("[\u0085\u2028\u2029]")
"""Legal inside JSON, but some clients split the lines of a stream at them."""
_FLOOR: Final = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""
_STREAM_HEADERS: Final = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_USAGE_HEADER: Final = USAGE_HEADER.lower().encode()
_LONG_BYTES: Final = 8192
"""Bodies shorter than this are processed before a client could disconnect."""
BlockKind = Literal["reasoning", "content", "call"]


@dataclass(slots=True)
class CollectedText:
    """All chunks of one choice."""

    choice: ChoiceStream
    texts: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: msgspec.Raw | None = None
    """Log-probabilities in the format of the API; None if none are shown."""
    finish_reason: str = ""
    stop_reason: str | int | None = None

    def add(self, chunk: TextChunk) -> None:
        """Add the next chunk."""
        self.texts.append(chunk.text)
        self.events += chunk.events
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


class AnswerFormat(abc.ABC):
    """Formats the response to one request, whole or as a stream."""

    stream_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    job: Job

    async def prepare(self, choice: ChoiceStream) -> None:  # noqa: B027  # most formats show no prompt scores
        """Encode the scores of a choice's prompt in slices: the loop feeds every stream. Called before `first`."""

    async def score(self, collected: CollectedText) -> None:  # noqa: B027
        """Encode the scores of a choice's tokens, in slices, before the `whole` answer."""

    @abc.abstractmethod
    def first(self, choice: ChoiceStream, usage: responses.Usage | None) -> bytes:
        """Return the events before a choice's first chunk; `usage` is the one so far, if every event includes it."""

    @abc.abstractmethod
    def event(self, choice: ChoiceStream, chunk: TextChunk, usage: responses.Usage | None) -> bytes:
        """Return the events for a chunk; `usage` as in `first`."""

    @abc.abstractmethod
    def last(self, usage: responses.Usage) -> bytes:
        """Return the events that end a stream."""

    @abc.abstractmethod
    def whole(self, collected: list[CollectedText], usage: responses.Usage) -> Any:
        """Return the response to a request without streaming, as a value that encodes to JSON."""

    def broken(self, error: ApiError) -> bytes:
        """Return the error event that ends a stream."""
        return b"event: error\ndata: " + error.body() + b"\n\n"


class ResponseFormat(AnswerFormat):
    """Formats completions and chats; events are concatenated from prepared bytes and the text, no objects per token."""

    answer: ClassVar[type[msgspec.Struct]]
    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    opening: ClassVar[bytes]
    """JSON between a choice's index and its text."""
    closing: ClassVar[bytes]
    """JSON after the text."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job = job
        self.tokenizer = tokenizer
        self._facts: dict[str, str | int] = {
            "id": self.id_prefix + job.record.request_id,
            "created": int(time.time()),
            "model": job.served.name,
        }
        self._facts["system_fingerprint"] = job.served.fingerprint
        self.head = b"data: " + _encode({"object": self.chunk_object, **self._facts})[:-1] + b',"choices":['
        self.end = b'],"usage":null}\n\n' if job.usage_in_stream else b"]}\n\n"
        self.plain = self.closing + b',"logprobs":null,"finish_reason":null}' + self.end
        self._heads: dict[int, bytes] = {}
        self.scored = job.logprobs is not None or job.token_ids
        self.prompt_scores: dict[int, Any] = {}
        """Scores of each prompt in vLLM's format, if requested."""

    @abc.abstractmethod
    def logprobs(self, choice: ChoiceStream, chunk: TextChunk) -> msgspec.Struct:
        """Return the log-probabilities of a chunk in the format of the API."""

    @abc.abstractmethod
    def choice(self, collected: CollectedText) -> msgspec.Struct:
        """Return one choice of the whole answer."""

    def whole(self, collected: list[CollectedText], usage: responses.Usage) -> msgspec.Struct:
        """Return the response to a request without streaming."""
        return self.answer(
            **self._facts, choices=[self.choice(each) for each in collected], usage=usage, warnings=self.job.warned
        )

    def event(self, choice: ChoiceStream, chunk: TextChunk, usage: responses.Usage | None) -> bytes:
        """Return the events for a chunk."""
        text = chunk.text
        head = self._heads.get(choice.index) or self.head_of(choice.index)
        payload = _encode(text) if text.isascii() else json_text(text)
        if chunk.finish_reason is None and usage is None and not self.scored:
            return b"%b%b%b" % (head, payload, self.plain)
        return self.full_event(choice, chunk, usage, b"%b%b%b" % (head, payload, self.closing))

    def head_of(self, index: int) -> bytes:
        """Return the JSON of an event up to the text of a choice."""
        head = self._heads[index] = self.head + b'{"index":%d' % index + self.opening
        return head

    def full_event(self, choice: ChoiceStream, chunk: TextChunk, usage: responses.Usage | None, begun: bytes) -> bytes:
        """Return the event of a chunk; `begun` is its JSON up to the end of the text."""
        job = self.job
        scores = b"null" if job.logprobs is None else _encode(self.logprobs(choice, chunk))
        parts = [begun, b',"logprobs":', scores, b',"finish_reason":']
        parts.append(_encode(chunk.finish_reason))
        if chunk.finish_reason is not None:
            parts += b',"stop_reason":', _encode(chunk.stop_reason)
            parts += b',"weight_version":', _encode(choice.deltas.weight_version)
        if job.token_ids:
            parts += b',"token_ids":', _encode(chunk.token_ids)
        return b"".join([*parts, b"}", self.end if usage is None else end_with(usage)])

    def lead(
        self, choice: ChoiceStream, usage: responses.Usage | None, content: bytes, scores: bytes = b"null"
    ) -> bytes:
        """Return an event that precedes the first chunk; `content` is JSON such as `,"text":""`."""
        job = self.job
        ids = b',"prompt_token_ids":' + _encode(job.prompts[choice.prompt_index]) if job.token_ids else b""
        end = b',"logprobs":' + scores + b',"finish_reason":null'
        event = self.head + b'{"index":%d' % choice.index + content + end + ids + b"}"
        end_of_event = self.end if usage is None else end_with(usage)
        if not job.warnings:
            return event + end_of_event
        return event + b'],"warnings":' + _encode(job.warnings) + end_of_event.removeprefix(b"]")

    def last(self, usage: responses.Usage) -> bytes:
        """Return the usage, if requested, and the end."""
        payload = self.head + b'],"usage":' + _encode(usage) + b"}\n\n" if self.job.usage_in_stream else b""
        return payload + _DONE

    async def prepare(self, choice: ChoiceStream) -> None:
        """Encode the log-probabilities of a choice's prompt."""
        top, prompt = self.job.prompt_logprobs, choice.prompt_index
        rows = None if choice.scores is None else choice.scores.rows
        if top is None or rows is None or prompt in self.prompt_scores:
            return
        pieces = [b"null"]  # for the first token
        ids = self.job.prompts[prompt][1:]
        for part in slices(len(rows)):
            pieces.append(_encode(prompt_logprobs(self.tokenizer, ids[part], rows[part], top=top))[1:-1])
            await asyncio.sleep(0)
        self.prompt_scores[prompt] = msgspec.Raw(b"[%b]" % b",".join(pieces))

    async def score(self, collected: CollectedText) -> None:
        """Encode the log-probabilities of a choice's tokens."""
        if self.job.logprobs is None:
            return
        lists = self.begun_scores(collected.choice)
        ids, rows = tuple(collected.token_ids), tuple(collected.logprobs)
        for part in slices(len(ids)) or [slice(0, 0)]:
            lists.add(self.logprobs(collected.choice, TextChunk("", ids[part], rows[part])))
            await asyncio.sleep(0)
        collected.scores = lists.encoded()

    def begun_scores(self, choice: ChoiceStream) -> EncodedLists:
        """Return log-probabilities that go before those of a choice's own tokens."""
        return EncodedLists()

    def ending(self, collected: CollectedText) -> dict[str, Any]:
        """Return the fields that choices of both APIs share."""
        choice = collected.choice
        fields: dict[str, Any] = {
            "index": choice.index,
            "finish_reason": collected.finish_reason,
            "stop_reason": collected.stop_reason,
            "weight_version": choice.deltas.weight_version,
            "logprobs": collected.scores,
        }
        if self.job.token_ids:
            fields["token_ids"] = collected.token_ids
            fields["prompt_token_ids"] = list(self.job.prompts[choice.prompt_index])
        return fields


def end_with(usage: responses.Usage) -> bytes:
    """Return the JSON after the choices of an event that includes the usage so far."""
    return b'],"usage":' + _encode(usage) + b"}\n\n"


def slices(count: int) -> Sequence[slice]:
    """Return consecutive slices that cover `count` tokens."""
    return [slice(begin, begin + _SLICE) for begin in range(0, count, _SLICE)]


def json_text(text: str) -> bytes:
    """Return a text as JSON without characters at which some clients break lines."""
    if not text.isascii() and _LINE_BREAKS.search(text):
        return json.dumps(text).encode()
    return _encode(text)


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], rows: Sequence[TokenLogprobs], top: int, as_ids: bool = False
) -> responses.ChatLogprobs:
    """Return log-probabilities in chat format with the `top` most likely of each; `as_ids` names tokens by id."""
    content = []
    for token_id, row in zip(ids, rows, strict=True):
        likely = [_top(tokenizer, *pair, as_ids) for pair in zip(row.top_ids[:top], row.top[:top], strict=True)]
        own = _top(tokenizer, token_id, row.logprob, as_ids=as_ids)
        content.append(responses.TokenLogprob(own.token, own.logprob, own.bytes, top_logprobs=likely))
    return responses.ChatLogprobs(content)


class EncodedLists:
    """An object of lists as JSON, made of parts with the same fields, so that none of them is large."""

    __slots__ = ("_others", "_pieces")

    def __init__(self, begun: EncodedLists | None = None) -> None:
        """Begin with the lists of another."""
        self._pieces: dict[str, list[bytes]] = {}
        self._others: dict[str, bytes] = {}
        """Fields that are no lists."""
        if begun is not None:
            self._pieces = {name: list(pieces) for name, pieces in begun._pieces.items()}
            self._others = dict(begun._others)

    def add(self, part: msgspec.Struct) -> None:
        """Append the lists of `part`."""
        for name in part.__struct_fields__:
            value = getattr(part, name)
            if not isinstance(value, list):
                self._others[name] = msgspec.json.encode(value)
                continue
            pieces = self._pieces.setdefault(name, [])
            if value:
                pieces.append(msgspec.json.encode(value)[1:-1])

    def encoded(self) -> msgspec.Raw:
        """Return the object."""
        fields = {name: b"[%b]" % b",".join(pieces) for name, pieces in self._pieces.items()} | self._others
        return msgspec.Raw(b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items()))


def prompt_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], rows: Sequence[TokenLogprobs], top: int
) -> list[dict[int, responses.PromptLogprob]]:
    """Return the scores of a prompt's tokens: for each position the token itself and the `top` most likely ones."""
    answer: list[dict[int, responses.PromptLogprob]] = []
    for token_id, row in zip(ids, rows, strict=True):
        ranks = dict(zip(row.top_ids[:top], range(1, top + 1), strict=False)) | {token_id: row.rank}
        likely = dict(zip(row.top_ids[:top], row.top[:top], strict=True)) | {token_id: row.logprob}
        answer.append(
            {
                each: responses.PromptLogprob(_finite(value), ranks[each], tokenizer.token_text(each))
                for each, value in likely.items()
            }
        )
    return answer


class CompletionLogprobsBuilder:
    """Builds log-probabilities in completions format for one choice, chunk by chunk, with each token's offset."""

    __slots__ = ("_as_ids", "_offset", "_text", "_tokenizer", "_top")

    def __init__(self, tokenizer: Tokenizer, top: int, offset: int, skip_special: bool, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._top = top
        self._offset = offset
        self._text = IncrementalDetokenizer(tokenizer, skip_special=skip_special)

    def build(self, ids: Sequence[int], rows: Sequence[TokenLogprobs | None]) -> responses.CompletionLogprobs:
        """Return the next tokens' log-probabilities; null for a token without, such as the first of a text."""
        answer = responses.CompletionLogprobs([], [], [], top_logprobs=[])
        for token_id, row in zip(ids, rows, strict=True):
            name = self._name(token_id)
            answer.text_offset.append(self._offset)
            answer.tokens.append(name)
            answer.token_logprobs.append(None if row is None else _finite(row.logprob))
            likely: dict[str, float] | None = None
            if row is not None:
                pairs = zip(row.top_ids[: self._top], row.top[: self._top], strict=True)
                likely = {self._name(each): _finite(value) for each, value in pairs} | {name: _finite(row.logprob)}
            answer.top_logprobs.append(likely)
            self._offset += len(self._text.push((token_id,)).text)
        return answer

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else _name(self._tokenizer, token_id)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float, as_ids: bool) -> responses.TopLogprob:
    spoken = tokenizer.token_bytes(token_id)
    name = f"token_id:{token_id}" if as_ids else spoken.decode("utf-8", "replace")
    return responses.TopLogprob(name, _finite(logprob), list(spoken))


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text; one that is no whole character is spelt in bytes, so that names stay distinct."""
    spoken = tokenizer.token_bytes(token_id)
    try:
        return spoken.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spoken)


def _finite(logprob: float) -> float:
    return logprob if logprob > _FLOOR else _FLOOR


class GenerationResponse(Response):
    """Generates and answers. The engine's work begins and ends within `__call__`, so no request can leak.

    The status is sent with the first token: an error before that is answered with a proper HTTP status and may be
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
        headers = {"content-type": response_format.stream_type, **_STREAM_HEADERS, **self._extra}
        started, sending, preparing = False, asyncio.Lock(), asyncio.Lock()

        async def emit(data: bytes, *, last: bool = False) -> None:
            """Send whole events, the head of the answer before the first; waits while the client reads too slowly.

            Choices continue one after the other then: all at once they would hold the event loop.
            """
            nonlocal started
            async with sending:
                if not started:
                    started = True
                    head = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": head})
                await send({"type": "http.response.body", "body": data, "more_body": not last})

        async def follow(choice: ChoiceStream) -> None:
            usage: responses.Usage | None = None
            begun = False
            while (chunk := await choice.next()) is not None:
                if job.usage_in_events:
                    usage = generation.usage()
                lead = b""
                if not begun:
                    begun = True
                    if choice.prefill is not None:  # reports the outcome of a remote prefill to the router
                        headers[OUTCOME_HEADER] = choice.prefill
                    if choice.scores is not None:
                        async with preparing:  # choices of one prompt share its scores
                            await response_format.prepare(choice)
                    lead = response_format.first(choice, usage)
                await emit(lead + response_format.event(choice, chunk, usage))

        try:
            async with UntilDisconnect(receive) as client, Generation(self._state, job) as generation:
                await generation.each(follow)
        except Exception as error:  # the stream's outer edge: the client gets every error
            if not started:
                raise
            await emit(response_format.broken(to_api_error(error)), last=True)
            return
        if client.disconnected:
            return
        usage = generation.used
        payload = b""
        # A router requests the usage of the answer; only server-sent events have comments.
        if _USAGE_HEADER in dict(scope["headers"]) and response_format.stream_type.startswith("text/event-stream"):
            payload = usage_comment(usage.prompt_tokens, usage.completion_tokens)
        await emit(payload + response_format.last(usage), last=True)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        collected: list[CollectedText] = []

        async def collect(choice: ChoiceStream) -> None:
            chunks = CollectedText(choice)
            collected.append(chunks)
            while (chunk := await choice.next()) is not None:
                chunks.add(chunk)

        async with UntilDisconnect(receive) as client, Generation(self._state, self._format.job) as generation:
            await generation.each(collect)
        if client.disconnected:
            return
        collected.sort(key=lambda each: each.choice.index)
        for each in collected:
            await self._format.prepare(each.choice)
            await self._format.score(each)
        body = msgspec.json.encode(self._format.whole(collected, generation.used))
        if len(body) > 1 << 20:
            await asyncio.sleep(0)  # sending copies it once more
        prefill = collected[0].choice.prefill
        headers = self._extra if prefill is None else {**self._extra, OUTCOME_HEADER: prefill}
        await Response(body, headers=headers, media_type="application/json")(scope, receive, send)


T = TypeVar("T")


async def cancel_on_disconnect(request: Request, work: Awaitable[T], *, long: bool = False) -> T:
    """Return the result of `work`, started after the body was read; cancel it and raise 499 on a disconnect.

    Work for a short body takes no time, unless it is `long`, as downloads are.
    """
    length = request.headers.get("content-length", "")
    if not long and length.isdecimal() and len(length) <= len(str(_LONG_BYTES)) and int(length) <= _LONG_BYTES:
        return await work
    async with UntilDisconnect(request.receive):
        return await work
    raise ApiError(499, "the client disconnected", code="client_gone")


class UntilDisconnect:
    """Runs a block until it ends or the client disconnects; then `disconnected` is true and the block was cancelled.

    Works as `asyncio.timeout` does: the task is cancelled once, and the cancellation ends with the block unless
    other code cancelled the task as well. The body of the request must have been read before. Leave the block
    before the last part of the answer is sent: servers report the end of an answer as a disconnect too.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._fired = self.disconnected = False

    async def __aenter__(self) -> UntilDisconnect:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("UntilDisconnect must be entered within a task")
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
        self.disconnected = True
        return kind is not None and issubclass(kind, asyncio.CancelledError)

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._fired = True
        self._task.cancel()


@dataclass(slots=True)
class AnswerBlock:
    """One block, as far as it has been generated."""

    index: int
    kind: BlockKind
    name: str = ""
    """Of the tool that a call is for."""
    call_id: str = ""
    """Id that the model gave the call, if any."""
    texts: list[str] = field(default_factory=list)
    is_complete: bool = False
    """True once the call ended or another block began; the end of the text may have cut off any other block."""

    @property
    def text(self) -> str:
        """Content, reasoning, or the JSON of a call's arguments."""
        return "".join(self.texts)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call; empty if they are not a complete JSON object."""
        try:
            value = msgspec.json.decode(self.text)
        except (msgspec.MsgspecError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


class BlockStep(NamedTuple):
    """A block begins, grows by a text, or is as complete as it gets."""

    kind: Literal["opened", "added", "closed"]
    block: AnswerBlock
    text: str = ""


@dataclass(slots=True)
class BlockWriter:
    """Converts events to steps."""

    blocks: list[AnswerBlock] = field(default_factory=list)
    _open: AnswerBlock | None = None

    def write(self, events: Iterable[Event]) -> Iterator[BlockStep]:
        """Yield the steps of the next events."""
        for event in events:
            if isinstance(event, CallBegun):
                yield from self._begin("call", event.name, event.call_id)
            elif isinstance(event, CallEnded):
                yield from self._complete()
            else:
                kind: BlockKind = "reasoning" if isinstance(event, ReasoningDelta) else "content"
                kind = "call" if isinstance(event, ArgumentsDelta) else kind
                if self._open is None or self._open.kind != kind:
                    yield from self._begin(kind)
                block = self.blocks[-1]
                block.texts.append(event.text)
                yield BlockStep("added", block, event.text)

    def close(self) -> Iterator[BlockStep]:
        """Close the block that the end of the text left open, if there is one."""
        if self._open is not None:
            yield BlockStep("closed", self._open)
            self._open = None

    def _complete(self) -> Iterator[BlockStep]:
        if self._open is not None:
            self._open.is_complete = True
        yield from self.close()

    def _begin(self, kind: BlockKind, name: str = "", call_id: str = "") -> Iterator[BlockStep]:
        yield from self._complete()
        self._open = AnswerBlock(len(self.blocks), kind, name, call_id)
        self.blocks.append(self._open)
        yield BlockStep("opened", self._open)


def blocks_of(events: Iterable[Event]) -> list[AnswerBlock]:
    """Return the blocks of a whole answer."""
    writer = BlockWriter()
    for _ in writer.write(events):
        pass
    return writer.blocks


def new_call_id(bare: bool) -> str:
    """Return an id for a call; a bare one has nine letters and digits, which some templates demand."""
    if bare:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def deltas(events: Iterable[Event], bare_ids: bool) -> list[bytes]:
    """Return the JSON of the deltas of events; the end of a call has none."""
    encoded = []
    for event in events:
        if isinstance(event, Content):
            encoded.append(b'{"content":%b}' % json_text(event.text))
        elif isinstance(event, ReasoningDelta):
            text = json_text(event.text)
            encoded.append(b'{"reasoning_content":%b,"reasoning":%b}' % (text, text))
        elif isinstance(event, CallBegun):
            begun = b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]}'
            encoded.append(
                begun % (event.index, json_text(event.call_id or new_call_id(bare_ids)), json_text(event.name))
            )
        elif isinstance(event, ArgumentsDelta):
            more = b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}'
            encoded.append(more % (event.index, json_text(event.text)))
    return encoded


def message_of(events: Iterable[Event], bare_ids: bool) -> responses.ChatMessage:
    """Return the message assembled from the events of an answer."""
    blocks = blocks_of(events)
    content = "".join(block.text for block in blocks if block.kind == "content")
    thought = "".join(block.text for block in blocks if block.kind == "reasoning") or msgspec.UNSET
    calls = [
        responses.ToolCall(
            id=block.call_id or new_call_id(bare_ids), function=responses.FunctionCall(block.name, block.text)
        )
        for block in blocks
        if block.kind == "call"
    ]
    return responses.ChatMessage(
        content=content or (None if any(block.kind != "content" for block in blocks) else ""),
        reasoning_content=thought,
        reasoning=thought,
        tool_calls=calls or msgspec.UNSET,
    )
