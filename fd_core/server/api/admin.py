"""POST /v1/abort_requests."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.http.access.record import RequestRecord
from fd_core.http.errors import invalid
from fd_core.server.api.openapi import endpoint
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.schemas.requests import AbortRequest
from fd_core.server.schemas.responses import AbortAnswer
from fd_core.server.state.state import ServerState, state_of

router = APIRouter()
_BODY: Final = BodyFormat(AbortRequest)


@router.post("/v1/abort_requests", **endpoint("Abort requests", AbortRequest, AbortAnswer))
async def abort_requests(request: Request) -> Response:
    """Abort requests by the `id` of their answer or by their X-Request-Id, or all of them.

    Their clients receive what was generated, with finish reason `length` and stop reason `abort`. With API keys, each
    aborts its own requests, and only an admin key those of others, which `abort_all` means as well. Without any, every
    client that reaches the server may abort all.
    """
    state = state_of(request)
    body, headers = await _BODY.read(request, state)
    record: RequestRecord = request.state.record
    if body.abort_all is True and body.req_ids is None:
        found = state.client.abort(state.active.all_ids(record.may_abort))
        answer = AbortAnswer(list(dict.fromkeys(map(state.active.request_id, found))), [])
    elif body.req_ids is not None and not body.abort_all:
        answer = _abort(state, body.req_ids, record)
    else:
        raise invalid('give either {"req_ids": ["..."]} or {"abort_all": true}', "req_ids")
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


def _abort(state: ServerState, given: list[str], record: RequestRecord) -> AbortAnswer:
    answer = AbortAnswer([], [])
    for name in dict.fromkeys(given):
        engine_ids = state.active.engine_ids(name, record.may_abort)
        found = state.client.abort(engine_ids) if engine_ids else []
        (answer.aborted if found else answer.not_found).append(name)
    return answer
