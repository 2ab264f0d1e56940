"""GET /kv_events: which prefixes this server's devices hold, for its router and nobody else.

The answer holds token ids, and so prompts. It is given only for the secret that router and workers share; API keys of
clients do not open it.
"""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.http.access.keys import KeyRing
from fd_core.http.errors import ApiError, invalid, unavailable
from fd_core.server.api.openapi import DirectRoute
from fd_core.server.state.state import ServerState, state_of
from fd_core.types.kv_events import KVPage

PATH: Final = "/kv_events"
OFFER_HEADER: Final = "X-KV-Events"
"""In the answer of /health: this server tells what it holds."""
WAIT_SECONDS: Final = 10.0
"""An answer without news is given after so long."""

router = APIRouter(route_class=DirectRoute)


def offers(state: ServerState) -> bool:
    """Whether there is something to tell, and somebody to whom."""
    return state.client.kv_log is not None and bool(state.config.router_secret)


@router.get(PATH, include_in_schema=False)
async def kv_events(request: Request) -> Response:
    """Answer with the events from number `after` on, once there are some; without it with all that is held."""
    state = state_of(request)
    told = state.client.kv_log
    if told is None or not offers(state):
        raise ApiError(
            404, "this server reports no cached prefixes; --kv-events and --router-secret-file turn the reports on"
        )
    if KeyRing([state.config.router_secret]).find(request.headers.get("authorization", "").encode()) is None:
        message = "the router's secret is required: send the header 'Authorization: Bearer SECRET'"
        raise ApiError(403, message, code="invalid_secret")
    given = request.query_params.get("after")
    if given is not None and not (given.isascii() and given.isdecimal() and len(given) <= 18):
        raise invalid("after is not the number of an event", "after")
    # The number may be another process's.
    after = int(given) if given is not None and request.query_params.get("instance") == state.incarnation else None
    await told.wait(after, WAIT_SECONDS)
    if told.closed:
        raise unavailable("the server is shutting down", "draining", retry_after=5)
    number, events = told.read(after)
    page = KVPage(
        instance=state.incarnation,
        reading=state.prompt_reader.fingerprint,
        block_size=told.block_size,
        next=number,
        events=events,
        engines=told.engines,
    )
    return Response(msgspec.msgpack.encode(page), media_type="application/msgpack")
