"""POST /v1/abort_requests."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.server.access.control import not_admin
from fd_core.server.body import BodyFormat
from fd_core.server.errors import invalid
from fd_core.server.openapi import endpoint
from fd_core.server.request_schemas import AbortRequest
from fd_core.server.response_schemas import AbortAnswer
from fd_core.server.state import ServerState, state_of

__all__ = ["router"]

router = APIRouter()
_BODY: Final = BodyFormat(AbortRequest)


@router.post("/v1/abort_requests", **endpoint("Abort requests", AbortRequest, AbortAnswer))
async def abort_requests(request: Request) -> Response:
    """Abort requests by the `id` of their answer or by their X-Request-Id, or all of them.

    Their clients receive what was generated, with finish reason `length` and stop reason `abort`. With API keys, each
    aborts its own requests, and only an admin key those of others. Without any, whoever can reach the server may do
    this, as he may use it.
    """
    state = state_of(request)
    body, headers = await _BODY.read(request, state.config.max_body_bytes)
    key = request.state.record.key
    everybodys = key is None or key.admin
    if body.abort_all is True and body.req_ids is None:
        if not everybodys:
            raise not_admin("abort_all")
        aborted = dict.fromkeys(state.active.request_id(each) for each in state.client.abort_all())
        answer = AbortAnswer(list(aborted), [])
    elif body.req_ids is not None and not body.abort_all:
        answer = _abort(state, body.req_ids, None if everybodys else key.owner)
    else:
        raise invalid('give either {"req_ids": ["..."]} or {"abort_all": true}', "req_ids")
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


def _abort(state: ServerState, given: list[str], owner: str | None) -> AbortAnswer:
    answer = AbortAnswer([], [])
    for name in dict.fromkeys(given):
        engine_ids = state.active.engine_ids(name, owner)
        found = state.client.abort(engine_ids) if engine_ids else []
        (answer.aborted if found else answer.not_found).append(name)
    return answer
