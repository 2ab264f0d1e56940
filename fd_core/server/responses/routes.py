"""POST /v1/responses, and GET and DELETE of answers that are kept."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.http.errors import ApiError
from fd_core.server.api.openapi import endpoint
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.preprocess.field_names import RESPONSES_NAMES
from fd_core.server.preprocess.jobs import conversation_job
from fd_core.server.preprocess.prompts import require_effort
from fd_core.server.responses.answering import ResponsesFormat
from fd_core.server.responses.asking import as_chat, demanded_form, earlier_messages
from fd_core.server.responses.schemas import REFUSED, DeletedResponse, ResponseAnswer, ResponsesRequest
from fd_core.server.responses.store import StoredResponse
from fd_core.server.schemas.requests import Message
from fd_core.server.state.state import state_of
from fd_core.server.stream.streaming import GenerationResponse, unless_gone

router = APIRouter()
BODY: Final = BodyFormat(ResponsesRequest, REFUSED)
_PATH: Final = "/v1/responses/{response_id}"


@router.post("/v1/responses", **endpoint("Answer with items", ResponsesRequest, ResponseAnswer, stream=True))
async def create_response(request: Request) -> Response:
    """Generate an answer to a conversation, in the shape of the Responses API."""
    state = state_of(request)
    body, headers = await BODY.read(request, state)
    chat = as_chat(body, earlier_messages(body, state.responses, request.state.owner))
    require_effort(state.prompt_reader, chat.reasoning_effort, "reasoning.effort")
    job = await unless_gone(request, conversation_job(state, chat, request, demanded_form(body), RESPONSES_NAMES))
    asked = (chat.messages or [])[1 if body.instructions else 0 :]

    def keep(answer: ResponseAnswer) -> None:
        state.responses.put(request.state.owner, StoredResponse(answer, (*asked, _said(answer))))

    keeps = bool(state.responses.capacity) and body.store is not False
    return GenerationResponse(state, ResponsesFormat(job, body, keep if keeps else None), bool(body.stream), headers)


@router.get(_PATH, **endpoint("An answer that is kept", None, ResponseAnswer, errors=(401, 404)))
async def get_response(request: Request, response_id: str) -> Response:
    """Return an answer that was kept."""
    found = state_of(request).responses.get(request.state.owner, response_id)
    if found is None:
        raise _not_kept(response_id)
    return Response(msgspec.json.encode(found.answer), media_type="application/json")


@router.delete(_PATH, **endpoint("Forget an answer", None, DeletedResponse, errors=(401, 404)))
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget an answer that was kept."""
    if not state_of(request).responses.delete(request.state.owner, response_id):
        raise _not_kept(response_id)
    return Response(msgspec.json.encode(DeletedResponse(id=response_id)), media_type="application/json")


def _said(answer: ResponseAnswer) -> Message:
    """Return what an answer adds to its conversation: one message of the assistant."""
    said = Message(role="assistant", content="")
    for item in answer.output:
        if item["type"] == "message":
            said.content = f"{said.content}" + "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            said.reasoning_content = (said.reasoning_content or "") + "".join(part["text"] for part in item["content"])
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            said.tool_calls = [*(said.tool_calls or ()), call]
    return said


def _not_kept(response_id: str) -> ApiError:
    return ApiError(404, f"the response {response_id[:80]!r} is not kept here (any more)", code="not_found")
