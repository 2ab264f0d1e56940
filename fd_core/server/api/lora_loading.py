"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while the server runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.http.errors import ApiError, invalid
from fd_core.server.api.openapi import endpoint
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.schemas.requests import LoadAdapterRequest, UnloadAdapterRequest
from fd_core.server.schemas.responses import AdapterAnswer
from fd_core.server.state.state import ServerState, state_of

router = APIRouter()
_LOAD: Final = BodyFormat(LoadAdapterRequest)
_UNLOAD: Final = BodyFormat(UnloadAdapterRequest)


@router.post("/v1/load_lora_adapter", **endpoint("Load a LoRA adapter", LoadAdapterRequest, AdapterAnswer))
async def load_adapter(request: Request) -> Response:
    """Serve the adapter in a folder below --lora-folder under a name of its own, as vLLM does."""
    state, folder = _allowed(request)
    body, headers = await _LOAD.read(request, state)
    if body.lora_name in state.names:
        raise invalid(f"the name {body.lora_name!r} is taken", "lora_name")
    place = await asyncio.to_thread(_inside, folder, body.lora_path)
    await state.client.change_adapters(body.lora_name, str(place))
    return _answer(f"the adapter {body.lora_name!r} is loaded", headers)


@router.post("/v1/unload_lora_adapter", **endpoint("Unload a LoRA adapter", UnloadAdapterRequest, AdapterAnswer))
async def unload_adapter(request: Request) -> Response:
    """Take no more requests for an adapter; those that use it go on to their ends."""
    state, _ = _allowed(request)
    body, headers = await _UNLOAD.read(request, state)
    found = state.names.get(body.lora_name)
    if found is None or not found.adapter:
        raise ApiError(404, f"there is no adapter named {body.lora_name!r}", param="lora_name", code="model_not_found")
    await state.client.change_adapters(body.lora_name, None)
    return _answer(f"the adapter {body.lora_name!r} is unloaded", headers)


def _allowed(request: Request) -> tuple[ServerState, Path]:
    """Return the state and the folder of adapters; `ApiError` (403) where adapters do not change."""
    state = state_of(request)
    folder = state.client.info.lora_folder
    if folder is None:
        raise ApiError(403, "adapters are not loaded while this server runs: it was started without --lora-folder")
    return state, Path(folder).expanduser().resolve()


def _inside(folder: Path, asked: str) -> Path:
    """Return the folder that is meant, links followed; `ApiError` (400) if it does not lie in `folder`."""
    try:
        place = (folder / asked).resolve()
        inside = place != folder and place.is_relative_to(folder) and place.is_dir()
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise invalid("lora_path is no folder below the one that --lora-folder names", "lora_path")
    return place


def _answer(message: str, headers: dict[str, str]) -> Response:
    answer = msgspec.json.encode(AdapterAnswer(message))
    return Response(answer, headers=headers, media_type="application/json")
