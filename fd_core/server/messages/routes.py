"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.errors import BadRequest
from fd_core.http.errors import ApiError
from fd_core.server.api.openapi import endpoint
from fd_core.server.messages.answering import MessagesFormat
from fd_core.server.messages.asking import as_chat, demanded_form
from fd_core.server.messages.schemas import (
    REFUSED,
    REFUSED_IN_MESSAGES,
    CountRequest,
    MessagesAnswer,
    MessagesRequest,
    TokenCountAnswer,
)
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.preprocess.field_names import MESSAGES_NAMES, named_as_sent
from fd_core.server.preprocess.jobs import conversation_job
from fd_core.server.preprocess.prompts import chat_prompt
from fd_core.server.state.state import state_of
from fd_core.server.stream.streaming import GenerationResponse, unless_gone

router = APIRouter()
BODY: Final = BodyFormat(MessagesRequest, REFUSED_IN_MESSAGES)
_COUNT: Final = BodyFormat(CountRequest, REFUSED)


@router.post("/v1/messages", **endpoint("Answer with blocks", MessagesRequest, MessagesAnswer, stream=True))
async def create_message(request: Request) -> Response:
    """Generate the assistant's next message, in Anthropic's shape."""
    state = state_of(request)
    body, headers = await BODY.read(request, state)
    asked = conversation_job(state, as_chat(state, body), request, demanded_form(body), MESSAGES_NAMES)
    job = await unless_gone(request, asked)
    return GenerationResponse(state, MessagesFormat(job), bool(body.stream), headers)


@router.post("/v1/messages/count_tokens", **endpoint("Tokens of a prompt", CountRequest, TokenCountAnswer))
async def count_tokens(request: Request) -> Response:
    """Return how many tokens a request's prompt has."""
    state = state_of(request)
    body, headers = await _COUNT.read(request, state)
    state.served(body.model)
    try:
        ids = await unless_gone(request, chat_prompt(state, as_chat(state, body)))
    except (ApiError, BadRequest) as error:
        raise named_as_sent(error, MESSAGES_NAMES) from None
    answer = msgspec.json.encode(TokenCountAnswer(len(ids)))
    return Response(answer, headers=headers, media_type="application/json")
