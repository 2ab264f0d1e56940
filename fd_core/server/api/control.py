"""Control endpoints: stop and continue generation, for operators and trainers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.schemas.responses import ControlAnswer
from fd_core.server.state import ServerState, state_of

router = APIRouter(route_class=DirectRoute)


@router.post("/v1/pause", **endpoint("Pause generation", None, ControlAnswer))
@router.post("/pause", include_in_schema=False)
async def pause(request: Request) -> Response:
    """Preempt every running request and save its KV. Requests, and new ones, wait until /v1/resume; none is lost.

    The response is sent once nothing computes any more.
    """
    state = state_of(request)
    await state.client.pause()
    return _answer(state)


@router.post("/v1/resume", **endpoint("Resume generation", None, ControlAnswer))
@router.post("/resume", include_in_schema=False)
async def resume(request: Request) -> Response:
    """Continue every request where it was paused; its text equals the text without the pause."""
    state = state_of(request)
    await state.client.resume()
    return _answer(state)


@router.get("/v1/control", **endpoint("Get the state that control endpoints change", None, ControlAnswer))
@router.get("/is_paused", include_in_schema=False)
async def control(request: Request) -> Response:
    """Return whether generation is paused."""
    return _answer(state_of(request))


def _answer(state: ServerState) -> Response:
    info = state.client.info
    return json_response(ControlAnswer(info.paused))
