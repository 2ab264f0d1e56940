"""POST /v1/messages and /v1/messages/count_tokens: requests become chats, answers Anthropic's messages or events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.errors import BadRequest
from fd_core.http.errors import ApiError, required, unsupported
from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.messages import schemas
from fd_core.server.messages.schemas import (
    CountRequest,
    ImageSource,
    InputBlock,
    MessagesRequest,
    ResultBlock,
    TextBlock,
    Turn,
)
from fd_core.server.preprocess import jobs
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.schemas.requests import (
    ChatRequest,
    ContentPart,
    Message,
    Tool,
    ToolChoice,
    function_tool,
    image_part,
    named_choice,
)
from fd_core.server.schemas.responses import Usage
from fd_core.server.stream import response_format
from fd_core.server.stream.generation import ChoiceStream, TextChunk
from fd_core.structured.grammar import RequestedConstraint, SchemaConstraint
from fd_core.types import FinishReason

router = APIRouter(route_class=DirectRoute)
_EXAMPLE: Final = {"model": "", "messages": [{"role": "user", "content": "Say hello."}]}
BODY: Final = BodyFormat(schemas.MessagesRequest, schemas.REFUSED_IN_MESSAGES)
_COUNT: Final = BodyFormat(schemas.CountRequest, schemas.REFUSED)
_TYPES: Final = {"content": "text", "reasoning": "thinking", "call": "tool_use"}
_DELTAS: Final = {
    "content": (b"text_delta", b"text"),
    "reasoning": (b"thinking_delta", b"thinking"),
    "call": (b"input_json_delta", b"partial_json"),
}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_USUAL_EFFORT: Final = "high"
"""Default reasoning effort."""


@router.post(
    "/v1/messages",
    **endpoint(
        "Create a message",
        schemas.MessagesRequest,
        schemas.MessagesAnswer,
        stream=True,
        example={**_EXAMPLE, "max_tokens": 16},
    ),
)
async def create_message(request: Request) -> Response:
    """Generate the assistant's next message, in Anthropic's format."""
    state, body, headers = await BODY.read(request)
    asked = jobs.conversation_job(state, as_chat(state, body), request, required_constraint(body), jobs.MESSAGES_NAMES)
    job = await response_format.cancel_on_disconnect(request, asked, long=state.images is not None)
    return response_format.GenerationResponse(state, _MessagesFormat(job), bool(body.stream), headers=headers)


@router.post(
    "/v1/messages/count_tokens",
    **endpoint("Count the tokens of a prompt", schemas.CountRequest, schemas.TokenCountAnswer, example=_EXAMPLE),
)
async def count_tokens(request: Request) -> Response:
    """Return how many tokens a request's prompt has."""
    state, body, headers = await _COUNT.read(request)
    state.served(body.model)
    try:
        reading = jobs.chat_prompt(state, as_chat(state, body))
        prompt = await response_format.cancel_on_disconnect(request, reading, long=state.images is not None)
    except (ApiError, BadRequest) as error:
        raise jobs.named_as_sent(error, jobs.MESSAGES_NAMES) from None
    return json_response(schemas.TokenCountAnswer(len(prompt.ids)), headers)


class _MessagesFormat(response_format.AnswerFormat):
    def __init__(self, job: jobs.Job) -> None:
        self.job = job
        self._writer = response_format.BlockWriter()
        self._ended = b""

    def whole(self, collected: list[response_format.CollectedText], usage: Usage) -> schemas.MessagesAnswer:
        [one] = collected
        stopped = _stop(one.choice, one.finish_reason, one.stop_reason)
        content = [_shown(block, whole=True) for block in response_format.blocks_of(one.events)]
        return self._answer(content, _usage(usage), *stopped)

    def first(self, choice: ChoiceStream, usage: Usage | None) -> bytes:
        prompt, cached = len(self.job.prompts[0]), choice.cached_tokens
        begun = schemas.MessagesUsage(input_tokens=prompt - cached, output_tokens=1, cache_read_input_tokens=cached)
        return _event("message_start", {"message": self._answer([], begun)})

    def event(self, choice: ChoiceStream, chunk: TextChunk, usage: Usage | None) -> bytes:
        events = b"".join(_spelled(step) for step in self._writer.write(chunk.events))
        if chunk.finish_reason is None:
            return events
        reason, sequence = _stop(choice, chunk.finish_reason, chunk.stop_reason)
        self._ended = msgspec.json.encode({"stop_reason": reason, "stop_sequence": sequence})
        return events + b"".join(_spelled(step) for step in self._writer.close())

    def last(self, usage: Usage) -> bytes:
        delta = b'event: message_delta\ndata: {"type":"message_delta","delta":%b,"usage":%b}\n\n'
        return delta % (self._ended, msgspec.json.encode(_usage(usage))) + _event("message_stop", {})

    def broken(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.messages_body() + b"\n\n"

    def _answer(
        self,
        content: list[dict[str, Any]],
        usage: schemas.MessagesUsage,
        reason: str | None = None,
        sequence: str | None = None,
    ) -> schemas.MessagesAnswer:
        return schemas.MessagesAnswer(
            id=f"msg_{self.job.record.request_id}",
            model=self.job.served.name,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
            warnings=self.job.warned,
        )


def _spelled(step: response_format.BlockStep) -> bytes:
    block = step.block
    if step.kind == "opened":
        return _event("content_block_start", {"index": block.index, "content_block": _shown(block, whole=False)})
    if step.kind == "added":
        kind, field = _DELTAS[block.kind]
        text = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}'
        return (
            b"event: content_block_delta\ndata: "
            + text % (block.index, kind, field, response_format.json_text(step.text))
            + b"\n\n"
        )
    stop = _event("content_block_stop", {"index": block.index})
    if block.kind == "reasoning":
        signed = {"index": block.index, "delta": {"type": "signature_delta", "signature": ""}}
        return _event("content_block_delta", signed) + stop
    return stop


def _shown(block: response_format.AnswerBlock, *, whole: bool) -> dict[str, Any]:
    """Return a block in Anthropic's format: complete, or as at the start of a stream."""
    kind = _TYPES[block.kind]
    if block.kind == "call":
        arguments = block.arguments if whole else {}
        return {
            "type": kind,
            "id": block.call_id or f"toolu_{secrets.token_hex(12)}",
            "name": block.name,
            "input": arguments,
        }
    if block.kind == "reasoning":
        return {"type": kind, "thinking": block.text if whole else "", "signature": ""}
    return {"type": kind, "text": block.text if whole else ""}


def _stop(choice: ChoiceStream, finish_reason: str, stop_reason: str | int | None) -> tuple[str, str | None]:
    """Return the stop reason and stop sequence. Raises `ApiError` if aborted: the API has no such stop reason."""
    if stop_reason is FinishReason.ABORT:
        raise ApiError(499, "the request was aborted; its text is incomplete", kind="api_error", code="aborted")
    if finish_reason == "length":
        return "max_tokens", None
    if isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return ("tool_use" if choice.called else "end_turn"), None


def _usage(usage: Usage) -> schemas.MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return schemas.MessagesUsage(
        input_tokens=usage.prompt_tokens - cached, output_tokens=usage.completion_tokens, cache_read_input_tokens=cached
    )


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"


def as_chat(state: jobs.PromptState, body: CountRequest) -> ChatRequest:
    """Convert a request to a chat. Raises `ApiError` (400) for fields that this server does not support."""
    effort = None if body.output_config is None else body.output_config.effort
    if effort == _USUAL_EFFORT and not state.prompt_reader.supports_effort:
        effort = None
    jobs.require_effort(state.prompt_reader, effort, "output_config.effort")
    messages = [Message(role="system", content=_text(body.system, "system"))] if body.system else []
    for index, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{index}]")
    goes_on = messages[-1].role == "assistant"
    chat = ChatRequest(
        model=body.model,
        messages=messages,
        continue_final_message=goes_on,
        tools=_tools(body),
        tool_choice=_choice(body),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        chat_template_kwargs=body.chat_template_kwargs,
    )
    chat.reasoning_effort = effort
    if state.prompt_reader.switches_reasoning:
        chat.enable_thinking = body.thinking is not None and body.thinking.type != "disabled"
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
        chat.stream = body.stream
        chat.stop = body.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.cache_salt, chat.priority = body.cache_salt, body.priority
        chat.user = body.metadata.user_id[:256] if body.metadata and body.metadata.user_id else None
        reasoning = state.parsers.reasoning
        if body.thinking is not None:
            chat.include_reasoning = body.thinking.display != "omitted"
            if reasoning is not None and reasoning.end:
                chat.reasoning_max_tokens = body.thinking.budget_tokens
    return chat


def required_constraint(body: CountRequest) -> RequestedConstraint | None:
    """Return the schema that the answer has to match, if there is one."""
    newer = None if body.output_config is None else body.output_config.format
    wanted, place = (
        (body.output_format, "output_format.schema") if newer is None else (newer, "output_config.format.schema")
    )
    return None if wanted is None else RequestedConstraint(place, SchemaConstraint(schema=wanted.schema))


def _messages(turn: Turn, place: str) -> list[Message]:
    """Return the chat's messages for one turn: tool results precede the user's text in the same turn."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    texts, thoughts, calls, answers = [], [], [], []
    parts: list[ContentPart] = []
    for index, block in enumerate(turn.content):
        where = f"{place}.content[{index}]"
        if block.type == "text":
            texts.append(required(block.text, f"{where}.text"))
            parts.append(ContentPart(type="text", text=texts[-1]))
        elif block.type == "image" and turn.role == "user":
            parts.append(_image(required(block.source, f"{where}.source"), f"{where}.source"))
        elif block.type == "tool_use" and turn.role == "assistant":
            given = {} if block.input is None else block.input
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            function = {"name": required(block.name, f"{where}.name"), "arguments": arguments}
            calls.append({"id": required(block.id, f"{where}.id"), "type": "function", "function": function})
        elif block.type == "tool_result" and turn.role == "user":
            result = _result(block.content or "", f"{where}.content")
            answered = required(block.tool_use_id, f"{where}.tool_use_id")
            answers.append(Message(role="tool", tool_call_id=answered, content=result))
        elif block.type == "thinking" and turn.role == "assistant":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            raise _unread(block, where, turn.role)
    if turn.role == "assistant":
        thought = "\n".join(thoughts) or None
        text = "\n".join(texts)
        return [Message(role="assistant", content=text, tool_calls=calls or None, reasoning_content=thought)]
    content: str | list[ContentPart] = parts if len(parts) > len(texts) else "\n".join(texts)
    return [*answers, *([Message(role=turn.role, content=content)] if parts or not answers else [])]


def _image(source: ImageSource, place: str) -> ContentPart:
    if source.type == "url":
        return image_part(required(source.url, f"{place}.url"), f"{place}.url")
    if source.type != "base64":
        raise unsupported(f"{place}.type is {str(source.type)[:40]!r}; expected base64 or url", f"{place}.type")
    data = required(source.data, f"{place}.data")
    return image_part(f"data:{source.media_type or ''};base64,{data}", f"{place}.data")


def _result(content: str | list[ResultBlock], place: str) -> str | list[ContentPart]:
    """Return the result of a tool as a text, or as parts if there are images."""
    if isinstance(content, str) or not any(block.type == "image" for block in content):
        return _text(content, place)
    parts: list[ContentPart] = []
    for index, block in enumerate(content):
        where = f"{place}[{index}]"
        if block.type == "image":
            parts.append(_image(required(block.source, f"{where}.source"), f"{where}.source"))
        elif block.type == "text":
            parts.append(ContentPart(type="text", text=required(block.text, f"{where}.text")))
        else:
            raise _unread(block, where, "tool_result")
    return parts


def _text(content: str | Sequence[TextBlock] | None, place: str) -> str:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content or ()):
        if block.type != "text" or block.text is None:
            raise _unread(block, f"{place}[{index}]", "text")
    return "\n".join(block.text or "" for block in content or ())


def _tools(body: CountRequest) -> list[Tool] | None:
    tools = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            message = f"tools[{index}].type is {tool.type[:40]!r}; only client tools of type 'custom' are supported"
            raise unsupported(message, f"tools[{index}].type")
        tools.append(function_tool(tool.name, tool.description, tool.input_schema, strict=tool.strict))
    return tools or None


def _choice(body: CountRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        return named_choice(required(choice.name, "tool_choice.name"))
    return _CHOICES[choice.type]


def _unread(block: InputBlock | TextBlock, where: str, role: str) -> Exception:
    return unsupported(
        f"{where}.type is {block.type[:40]!r}, which is not supported here ({role}); supported: text, image, thinking, "
        "tool_use, tool_result",
        f"{where}.type",
    )
