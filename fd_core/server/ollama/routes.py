"""POST /api/chat, /api/generate, /api/embed and /api/show, GET /api/tags, /api/ps and /api/version.

Requests become chats or completions. A stream is a line of JSON for each piece of text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

import fd_core
from fd_core.http.errors import ApiError, VersionAnswer, unsupported
from fd_core.server.api.embeddings import PooledTexts
from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.ollama import schemas
from fd_core.server.ollama.schemas import AnswerLine, ChatTurn, Options
from fd_core.server.preprocess import jobs
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.schemas.pooling import EmbeddingRequest
from fd_core.server.schemas.requests import ChatRequest, ContentPart, Message, image_part
from fd_core.server.schemas.responses import Usage
from fd_core.server.state import ServedName, ServerState, state_of
from fd_core.server.stream.generation import ChoiceStream, TextChunk
from fd_core.server.stream.response_format import (
    AnswerBlock,
    AnswerFormat,
    BlockWriter,
    CollectedText,
    GenerationResponse,
    blocks_of,
    cancel_on_disconnect,
)
from fd_core.structured.grammar import RequestedConstraint, SchemaConstraint
from fd_core.text.parsing.events import Content, Event

router = APIRouter(route_class=DirectRoute)
_endpoint = partial(endpoint, error=schemas.ErrorText)
_CHAT_EXAMPLE: Final = {"model": "", "messages": [{"role": "user", "content": "Say hello."}], "stream": False}
CHAT_BODY: Final = BodyFormat(schemas.OllamaChatRequest, schemas.REFUSED, needs_type=False)
GENERATE_BODY: Final = BodyFormat(schemas.GenerateRequest, schemas.REFUSED, needs_type=False)
EMBED_BODY: Final = BodyFormat(schemas.EmbedRequest, needs_type=False)
SHOW_BODY: Final = BodyFormat(schemas.ShowRequest, needs_type=False)
_NAMES: Final = {
    "(max_tokens|max_completion_tokens)": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "(temperature|top_k|top_p|min_p|seed|stop|presence_penalty|frequency_penalty)": r"options.\1",
    "(enable_thinking|reasoning_effort)": "think",
}
"""Names of fields of chats in this API."""
_SAME: Final = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
"""Options with the same name and meaning in a chat."""


@router.post(
    "/api/chat",
    **_endpoint("Chat, as Ollama does", schemas.OllamaChatRequest, AnswerLine, lines=True, example=_CHAT_EXAMPLE),
)
async def create_chat(request: Request) -> Response:
    """Generate the next message of a conversation."""
    return await _answered(request, *await CHAT_BODY.read(request))


@router.post(
    "/api/generate",
    **_endpoint(
        "Complete a text, as Ollama does",
        schemas.GenerateRequest,
        AnswerLine,
        lines=True,
        example={"model": "", "prompt": "Say hello.", "stream": False},
    ),
)
async def generate(request: Request) -> Response:
    """Answer a prompt, or continue it if it is raw or the model has no chat template."""
    return await _answered(request, *await GENERATE_BODY.read(request))


async def _answered(
    request: Request, state: ServerState, body: schemas.OllamaTextRequest, headers: dict[str, str]
) -> Response:
    chat, served = as_chat(state, body), _served(state, body.model)
    reader = state.prompt_reader
    thinks = state.parsers.reasoning is not None or reader.switches_reasoning or reader.supports_effort
    if body.think not in (None, False, "none") and not thinks:
        raise unsupported(f'"{served.name}" does not support thinking; omit think, or set it to false', "think")
    is_chat = isinstance(body, schemas.OllamaChatRequest)
    if not chat.messages:
        return _loaded(served, ChatTurn(role="assistant", content="") if is_chat else None)
    chat.model = served.name
    making = jobs.conversation_job(state, chat, request, _constraint(body), _NAMES)
    job = await cancel_on_disconnect(request, making, long=state.images is not None)
    return GenerationResponse(state, _LineFormat(job, is_chat=is_chat), body.stream is not False, headers)


def as_chat(state: jobs.PromptState, body: schemas.OllamaTextRequest) -> ChatRequest:
    """Convert a request to a chat, without messages if it asks for no text."""
    reader, options = state.prompt_reader, body.options or Options()
    if isinstance(body, schemas.OllamaChatRequest):
        chat = ChatRequest(messages=list(_messages(body.messages)), tools=body.tools)
    else:
        prompt = []
        if body.prompt or body.images:
            prompt = [Message(role="user", content=_content(body.prompt, body.images, "images"))]
        if body.raw or reader.template_source is None:
            reason = "raw=true continues the prompt alone" if body.raw else "this model has no chat template"
            for field, given in (("system", body.system), ("images", body.images)):
                if given:
                    raise unsupported(f"{field} is not supported: {reason}", field)
            chat = ChatRequest(messages=prompt, disable_chat_template=True, add_special_tokens=True)
        else:
            system = [Message(role="system", content=body.system)] if body.system and prompt else []
            chat = ChatRequest(messages=[*system, *prompt])
    if isinstance(body.think, str) and reader.supports_effort:
        chat.reasoning_effort = body.think
    elif body.think is not None and reader.switches_reasoning:
        chat.enable_thinking = body.think not in (False, "none")
    for name in _SAME:
        setattr(chat, name, getattr(options, name))
    chat.repetition_penalty = options.repeat_penalty
    if options.num_predict is not None and options.num_predict > 0:
        chat.max_tokens = options.num_predict
    return chat


def _constraint(body: schemas.OllamaTextRequest) -> RequestedConstraint | None:
    if not body.format:
        return None
    schema = {"type": "object"} if body.format == "json" else body.format
    return RequestedConstraint("format", SchemaConstraint(schema=schema))


def _messages(turns: Iterable[ChatTurn]) -> Iterable[Message]:
    """Yield the messages of a chat; a tool's message answers the first call, of its `tool_name`, that has no answer."""
    count, unanswered = 0, dict[str, str]()
    for index, turn in enumerate(turns):
        calls: list[dict[str, Any]] = []
        for call in turn.tool_calls or ():
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": f"call_{count}", "type": "function", "function": function})
            unanswered[f"call_{count}"] = call.function.name
            count += 1
        answers = None
        if turn.role == "tool":
            named = (call for call, name in unanswered.items() if turn.tool_name in (None, "", name))
            answers = next(named, next(iter(unanswered), None))
            unanswered.pop(answers or "", None)
        yield Message(
            role=turn.role,
            content=_content(turn.content or "", turn.images, f"messages[{index}].images"),
            reasoning_content=turn.thinking,
            tool_calls=calls or None,
            tool_call_id=answers,
            name=turn.tool_name or None if turn.role == "tool" else None,
        )


def _content(text: str, images: Sequence[str] | None, field: str) -> str | list[ContentPart]:
    """Return a text, or the parts of the images of a turn and of its text."""
    if not images:
        return text
    parts: list[ContentPart] = [
        image_part(f"data:;base64,{data}", f"{field}[{index}]") for index, data in enumerate(images)
    ]
    return [*parts, ContentPart(type="text", text=text)]


def _loaded(served: ServedName, message: ChatTurn | None) -> Response:
    text = None if message is not None else ""
    line = AnswerLine(
        model=served.name, created_at=_now(), message=message, response=text, done=True, done_reason="load"
    )
    return json_response(line)


class _LineFormat(AnswerFormat):
    """Formats an answer as lines of JSON."""

    stream_type = "application/x-ndjson"

    def __init__(self, job: jobs.Job, *, is_chat: bool) -> None:
        self.job = job
        self._is_chat = is_chat
        self._writer = BlockWriter()
        self._choice: ChoiceStream | None = None
        self._reason = ""

    def first(self, choice: ChoiceStream, usage: Usage | None) -> bytes:
        self._choice = choice
        return b""

    def event(self, choice: ChoiceStream, chunk: TextChunk, usage: Usage | None) -> bytes:
        lines = []
        for step in self._writer.write(_events(choice, chunk.text, chunk.events)):
            if step.kind == "added" and step.block.kind == "content":
                lines.append(self._line(content=step.text))
            elif step.kind == "added" and step.block.kind == "reasoning":
                lines.append(self._line(thinking=step.text))
            elif step.kind == "closed" and step.block.kind == "call":
                lines.append(self._line(calls=[step.block]))
        if chunk.finish_reason is not None:
            self._reason = chunk.finish_reason
        return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)

    def last(self, usage: Usage) -> bytes:
        line = self._ended(self._line(), self._choice, self._reason, usage)
        return msgspec.json.encode(line) + b"\n"

    def whole(self, collected: list[CollectedText], usage: Usage) -> AnswerLine:
        [one] = collected
        blocks = blocks_of(_events(one.choice, one.text, one.events))
        texts = {
            kind: "".join(block.text for block in blocks if block.kind == kind) for kind in ("content", "reasoning")
        }
        calls = [block for block in blocks if block.kind == "call" and block.is_complete]  # as in a stream
        line = self._line(content=texts["content"], thinking=texts["reasoning"] or None, calls=calls)
        return self._ended(line, one.choice, one.finish_reason, usage)

    def broken(self, error: ApiError) -> bytes:
        return error.ollama_body() + b"\n"

    def _line(self, content: str = "", thinking: str | None = None, calls: Iterable[AnswerBlock] = ()) -> AnswerLine:
        line = AnswerLine(model=self.job.served.name, created_at=_now(), done=False)
        if not self._is_chat:
            line.response, line.thinking = content, thinking
            return line
        called = [
            schemas.TurnCall(function=schemas.CalledFunction(name=block.name, arguments=block.arguments))
            for block in calls
        ]
        line.message = ChatTurn(role="assistant", content=content, thinking=thinking, tool_calls=called or None)
        return line

    def _ended(self, line: AnswerLine, choice: ChoiceStream | None, reason: str, usage: Usage) -> AnswerLine:
        line.done, line.done_reason = True, "length" if reason == "length" else "stop"
        line.prompt_eval_count, line.eval_count = usage.prompt_tokens, usage.completion_tokens
        line.total_duration, line.load_duration = _nanoseconds(time.perf_counter() - self.job.arrived), 0
        if choice is not None:
            times = choice.times
            line.prompt_eval_duration = _nanoseconds(times.first - times.arrived)
            line.eval_duration = _nanoseconds(times.last - times.first)
        return line


def _events(choice: ChoiceStream, text: str, events: Iterable[Event]) -> Iterable[Event]:
    """Return the events of a text; a completion is not parsed, its text is content."""
    if choice.answer is not None:
        return events
    return [Content(text)] if text else []


@router.post(
    "/api/embed",
    **_endpoint(
        "Create embeddings, as Ollama does",
        schemas.EmbedRequest,
        schemas.EmbedAnswer,
        example={"model": "", "input": "a text"},
    ),
)
async def embed(request: Request) -> Response:
    """Return a vector of length 1 for each text."""
    began = time.perf_counter()
    state, body, headers = await EMBED_BODY.read(request)
    served = _served(state, body.model)
    asked = as_embedding(body)
    asked.model = served.name
    texts = PooledTexts(state, request, asked)
    vectors = await texts.vectors(await texts.read(asked), "input", asked.dimensions)
    unit = [(vector / max(float(np.linalg.norm(vector)), 1e-12)).tolist() for vector in vectors]
    answer = schemas.EmbedAnswer(
        model=served.name,
        embeddings=unit,
        total_duration=_nanoseconds(time.perf_counter() - began),
        prompt_eval_count=texts.usage.prompt_tokens,
    )
    return json_response(answer, headers)


def as_embedding(body: schemas.EmbedRequest) -> EmbeddingRequest:
    """Convert a request to one of /v1/embeddings; texts are truncated unless it refuses that."""
    longest = None if body.truncate is False else -1
    return EmbeddingRequest(
        model=body.model, input=body.input, dimensions=body.dimensions, truncate_prompt_tokens=longest
    )


@router.get("/api/tags", **_endpoint("List the served models, as Ollama does", None, schemas.TagsAnswer))
async def tags(request: Request) -> Response:
    """List the names under which the model answers."""
    return json_response(schemas.TagsAnswer(_listed(state_of(request))))


@router.get("/api/ps", **_endpoint("List the loaded models, as Ollama does", None, schemas.TagsAnswer))
async def running(request: Request) -> Response:
    """List the same models: all are loaded."""
    listed = _listed(state_of(request))
    for each in listed:
        each.size_vram, each.expires_at = each.size, "9999-12-31T23:59:59Z"
    return json_response(schemas.TagsAnswer(listed))


@router.post(
    "/api/show",
    **_endpoint("Describe a model, as Ollama does", schemas.ShowRequest, schemas.ShowAnswer, example={"model": ""}),
)
async def show(request: Request) -> Response:
    """Describe architecture, abilities and sampling defaults of a model."""
    state, body, headers = await SHOW_BODY.read(request)
    _served(state, body.model)
    info, reader = state.client.info, state.prompt_reader
    abilities = {
        "completion": info.generates,
        "embedding": not info.generates,
        "tools": state.parsers.tools is not None,
        "thinking": state.parsers.reasoning is not None,
        "vision": state.images is not None,
    }
    answer = schemas.ShowAnswer(
        details=_details(state),
        model_info={
            "general.architecture": info.architecture,
            "general.parameter_count": info.num_parameters,
            f"{info.architecture}.context_length": info.max_model_len,
            f"{info.architecture}.embedding_length": info.state_size,
        },
        capabilities=[name for name, has in abilities.items() if has],
        template=reader.template_source or "",
        modified_at=_when(state.created),
        parameters="\n".join(f"{name} {value:g}" for name, value in info.generation.set_fields().items()),
    )
    return json_response(answer, headers)


@router.get("/api/version", **_endpoint("Show the version, as Ollama does", None, VersionAnswer))
async def version(request: Request) -> Response:
    """Return the version of fd_core."""
    return json_response(VersionAnswer(fd_core.__version__))


def _served(state: ServerState, name: str) -> ServedName:
    """Return the model of a name, with or without the tag `latest`. Raises `ApiError` (404)."""
    return state.served(name if name in state.names else name.removesuffix(schemas.LATEST))


def _listed(state: ServerState) -> list[schemas.ListedName]:
    size = sum(use.nbytes for use in state.client.info.weights)
    return [
        schemas.ListedName(
            name=served.name,
            model=served.name,
            modified_at=_when(state.created),
            size=size,
            digest=served.fingerprint,
            details=_details(state),
        )
        for served in state.names.values()
    ]


def _details(state: ServerState) -> schemas.ModelDetails:
    info = state.client.info
    return schemas.ModelDetails(
        family=info.architecture,
        families=[info.architecture],
        parameter_size=f"{info.num_parameters / 1e6:,.1f}M",
        quantization_level=info.weights[0].computed if info.weights else info.dtype,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _when(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e9))
