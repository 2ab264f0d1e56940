"""Control endpoints for operators and trainers, also under the paths of vLLM and SGLang."""

from __future__ import annotations

import asyncio
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.http.errors import invalid
from fd_core.server.api.admin import allowed_folder, inside
from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.schemas.requests import UpdateWeightsRequest
from fd_core.server.schemas.responses import ControlAnswer
from fd_core.server.state import ServerState, state_of

router = APIRouter(route_class=DirectRoute)
_UPDATE: Final = BodyFormat(UpdateWeightsRequest)
_FLAG: Final = "--weights-folder"


@router.post("/v1/pause", **endpoint("Pause generation", None, ControlAnswer))
@router.post("/pause", include_in_schema=False)
@router.post("/pause_generation", include_in_schema=False)
async def pause(request: Request) -> Response:
    """Preempt every running request and save its KV. Requests, and new ones, wait until /v1/resume; none is lost.

    The response is sent once nothing computes any more.
    """
    state = state_of(request)
    await state.client.pause()
    return _answer(state)


@router.post("/v1/resume", **endpoint("Resume generation", None, ControlAnswer))
@router.post("/resume", include_in_schema=False)
@router.post("/continue_generation", include_in_schema=False)
async def resume(request: Request) -> Response:
    """Continue every request where it was paused; its text equals the text without the pause."""
    state = state_of(request)
    await state.client.resume()
    return _answer(state)


@router.post("/v1/sleep", **endpoint("Release memory", None, ControlAnswer))
@router.post("/sleep", include_in_schema=False)
async def sleep(request: Request) -> Response:
    """Pause, and release the memory of the KV cache, with `?level=2` also that of the weights, until /v1/wake_up."""
    state, level = state_of(request), request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise invalid(f"level={level[:20]!r} is not supported; use 1 (KV cache) or 2 (KV cache and weights)", "level")
    await state.client.sleep(int(level))
    return _answer(state)


@router.post("/v1/wake_up", **endpoint("Restore memory", None, ControlAnswer))
@router.post("/wake_up", include_in_schema=False)
async def wake_up(request: Request) -> Response:
    """Restore KV cache and weights, and continue every request where it was."""
    state = state_of(request)
    await state.client.wake_up()
    return _answer(state)


@router.post("/v1/reset_prefix_cache", **endpoint("Forget cached prefixes", None, ControlAnswer))
@router.post("/reset_prefix_cache", include_in_schema=False)
@router.post("/flush_cache", include_in_schema=False)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget the prefixes in the device cache, between two steps. KV in host memory and in a KV store stays."""
    state = state_of(request)
    await state.client.reset_prefix_cache()
    return _answer(state)


@router.post(
    "/v1/update_weights",
    **endpoint("Replace the weights", UpdateWeightsRequest, ControlAnswer, example={"model_path": "step-10"}),
)
@router.post("/update_weights_from_disk", include_in_schema=False)
async def update_weights(request: Request) -> Response:
    """Replace the weights between two steps by those of a folder below --weights-folder, of the same shapes.

    Running requests continue with the new weights after their tokens so far, and recompute their KV. On an error
    nothing has changed.
    """
    folder = allowed_folder(state_of(request).client.info.weights_folder, "weights", _FLAG)
    state, body, headers = await _UPDATE.read(request)
    place = await asyncio.to_thread(inside, folder, body.model_path, "model_path", _FLAG)
    await state.client.update_weights(place, body.weight_version)
    return _answer(state, headers)


@router.get("/v1/control", **endpoint("Get the state that control endpoints change", None, ControlAnswer))
@router.get("/is_paused", include_in_schema=False)
@router.get("/is_sleeping", include_in_schema=False)
async def control(request: Request) -> Response:
    """Return whether generation is paused, whether the engine sleeps, and the version of the weights."""
    return _answer(state_of(request))


def _answer(state: ServerState, headers: dict[str, str] | None = None) -> Response:
    info = state.client.info
    return json_response(
        ControlAnswer(info.paused, info.sleep_level > 0, info.sleep_level, info.weight_version), headers
    )
