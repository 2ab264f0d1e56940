"""POST /v1/messages and /v1/messages/count_tokens, and answers as a message of Anthropic's, whole or as events."""

from __future__ import annotations

import secrets
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.errors import BadRequest
from fd_core.http.errors import ApiError
from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.messages import schemas
from fd_core.server.messages.asking import as_chat, demanded_form
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.preprocess.jobs import MESSAGES_NAMES, Job, conversation_job, named_as_sent
from fd_core.server.preprocess.prompts import chat_prompt
from fd_core.server.schemas.responses import Usage
from fd_core.server.stream.blocks import AnswerBlock, BlockStep, BlockWriter, blocks_of
from fd_core.server.stream.generation import ChoiceStream, TextChunk
from fd_core.server.stream.response_format import AnswerFormat, CollectedText, json_text
from fd_core.server.stream.streaming import GenerationResponse, unless_gone
from fd_core.types import FinishReason

router = APIRouter(route_class=DirectRoute)
BODY: Final = BodyFormat(schemas.MessagesRequest, schemas.REFUSED_IN_MESSAGES)
_COUNT: Final = BodyFormat(schemas.CountRequest, schemas.REFUSED)
_TYPES: Final = {"content": "text", "reasoning": "thinking", "call": "tool_use"}
_DELTAS: Final = {
    "content": (b"text_delta", b"text"),
    "reasoning": (b"thinking_delta", b"thinking"),
    "call": (b"input_json_delta", b"partial_json"),
}


@router.post(
    "/v1/messages", **endpoint("Answer with blocks", schemas.MessagesRequest, schemas.MessagesAnswer, stream=True)
)
async def create_message(request: Request) -> Response:
    """Generate the assistant's next message, in Anthropic's shape."""
    state, body, headers = await BODY.read(request)
    asked = conversation_job(state, as_chat(state, body), request, demanded_form(body), MESSAGES_NAMES)
    job = await unless_gone(request, asked)
    return GenerationResponse(state, _MessagesFormat(job), bool(body.stream), headers)


@router.post(
    "/v1/messages/count_tokens", **endpoint("Tokens of a prompt", schemas.CountRequest, schemas.TokenCountAnswer)
)
async def count_tokens(request: Request) -> Response:
    """Return how many tokens a request's prompt has."""
    state, body, headers = await _COUNT.read(request)
    state.served(body.model)
    try:
        ids = await unless_gone(request, chat_prompt(state, as_chat(state, body)))
    except (ApiError, BadRequest) as error:
        raise named_as_sent(error, MESSAGES_NAMES) from None
    return json_response(schemas.TokenCountAnswer(len(ids)), headers)


class _MessagesFormat(AnswerFormat):
    """Spells one answer of the Messages API."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._writer = BlockWriter()
        self._ended = b""

    def whole(self, collected: list[CollectedText], usage: Usage) -> schemas.MessagesAnswer:
        [one] = collected
        stopped = _stop(one.choice, one.finish_reason, one.stop_reason)
        content = [_shown(block, whole=True) for block in blocks_of(one.events)]
        return self._answer(content, _usage(usage), *stopped)

    def first(self, choice: ChoiceStream, usage: Usage | None) -> bytes:
        prompt, cached = len(self.job.prompts[0]), choice.cached_tokens
        begun = schemas.MessagesUsage(input_tokens=prompt - cached, output_tokens=1, cache_read_input_tokens=cached)
        return _event("message_start", {"message": self._answer([], begun)})

    def event(self, choice: ChoiceStream, chunk: TextChunk, usage: Usage | None) -> bytes:
        said = b"".join(_spelled(step) for step in self._writer.write(chunk.events))
        if chunk.finish_reason is None:
            return said
        reason, sequence = _stop(choice, chunk.finish_reason, chunk.stop_reason)
        self._ended = msgspec.json.encode({"stop_reason": reason, "stop_sequence": sequence})
        return said + b"".join(_spelled(step) for step in self._writer.close())

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


def _spelled(step: BlockStep) -> bytes:
    block = step.block
    if step.kind == "opened":
        return _event("content_block_start", {"index": block.index, "content_block": _shown(block, whole=False)})
    if step.kind == "added":
        kind, field = _DELTAS[block.kind]
        text = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}'
        return b"event: content_block_delta\ndata: " + text % (block.index, kind, field, json_text(step.text)) + b"\n\n"
    stop = _event("content_block_stop", {"index": block.index})
    if block.kind == "reasoning":
        signed = {"index": block.index, "delta": {"type": "signature_delta", "signature": ""}}
        return _event("content_block_delta", signed) + stop
    return stop


def _shown(block: AnswerBlock, *, whole: bool) -> dict[str, Any]:
    """Return a block as it is shown: with all that it holds, or as it begins."""
    kind = _TYPES[block.kind]
    if block.kind == "call":
        arguments = _object(block.text) if whole else {}
        return {"type": kind, "id": f"toolu_{secrets.token_hex(12)}", "name": block.name, "input": arguments}
    if block.kind == "reasoning":
        return {"type": kind, "thinking": block.text if whole else "", "signature": ""}
    return {"type": kind, "text": block.text if whole else ""}


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; none where they are half an object, or nothing that JSON can carry."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _stop(choice: ChoiceStream, finish_reason: str, stop_reason: str | int | None) -> tuple[str, str | None]:
    """Return why a message ended. Raises `ApiError` for one that was aborted: no reason of the API's says so."""
    if stop_reason is FinishReason.ABORT:
        raise ApiError(499, "the request was aborted; its text is not whole", kind="api_error", code="aborted")
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
