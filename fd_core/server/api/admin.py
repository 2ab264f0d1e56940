"""POST /v1/abort_requests, and adapters that come and go while the server runs: /v1/load_lora_adapter and unload."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.http.access.record import RequestRecord
from fd_core.http.errors import ApiError, invalid
from fd_core.server.api.openapi import endpoint, json_response
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.schemas.requests import AbortRequest, LoadAdapterRequest, UnloadAdapterRequest
from fd_core.server.schemas.responses import AbortAnswer, AdapterAnswer
from fd_core.server.state.state import state_of

router = APIRouter()
_ABORT: Final = BodyFormat(AbortRequest)
_LOAD: Final = BodyFormat(LoadAdapterRequest)
_UNLOAD: Final = BodyFormat(UnloadAdapterRequest)


@router.post("/v1/abort_requests", **endpoint("Abort requests", AbortRequest, AbortAnswer))
async def abort_requests(request: Request) -> Response:
    """Abort requests by the `id` of their answer or by their X-Request-Id, or all of them.

    Their clients receive what was generated, with finish reason `length` and stop reason `abort`. With API keys, each
    aborts its own requests, and only an admin key those of others, which `abort_all` means as well. Without any, every
    client that reaches the server may abort all.
    """
    state, body, headers = await _ABORT.read(request)
    record: RequestRecord = request.state.record
    if body.abort_all is True and body.req_ids is None:
        found = state.client.abort(state.active.all_ids(record.may_abort))
        answer = AbortAnswer(list(dict.fromkeys(map(state.active.request_id, found))), [])
    elif body.req_ids is not None and not body.abort_all:
        answer = AbortAnswer([], [])
        for name in dict.fromkeys(body.req_ids):
            engine_ids = state.active.engine_ids(name, record.may_abort)
            found = state.client.abort(engine_ids) if engine_ids else []
            (answer.aborted if found else answer.not_found).append(name)
    else:
        raise invalid('give either {"req_ids": ["..."]} or {"abort_all": true}', "req_ids")
    return json_response(answer, headers)


@router.post("/v1/load_lora_adapter", **endpoint("Load a LoRA adapter", LoadAdapterRequest, AdapterAnswer))
async def load_adapter(request: Request) -> Response:
    """Serve the adapter in a folder below --lora-folder under a name of its own, as vLLM does."""
    folder = _adapter_folder(request)
    state, body, headers = await _LOAD.read(request)
    if body.lora_name in state.names:
        raise invalid(f"the name {body.lora_name!r} is taken", "lora_name")
    place = await asyncio.to_thread(_inside, folder, body.lora_path)
    await state.client.change_adapters(body.lora_name, str(place))
    return json_response(AdapterAnswer(f"the adapter {body.lora_name!r} is loaded"), headers)


@router.post("/v1/unload_lora_adapter", **endpoint("Unload a LoRA adapter", UnloadAdapterRequest, AdapterAnswer))
async def unload_adapter(request: Request) -> Response:
    """Take no more requests for an adapter; those that use it go on to their ends."""
    _adapter_folder(request)
    state, body, headers = await _UNLOAD.read(request)
    found = state.names.get(body.lora_name)
    if found is None or not found.adapter:
        raise ApiError(404, f"there is no adapter named {body.lora_name!r}", param="lora_name", code="model_not_found")
    await state.client.change_adapters(body.lora_name, None)
    return json_response(AdapterAnswer(f"the adapter {body.lora_name!r} is unloaded"), headers)


def _adapter_folder(request: Request) -> Path:
    """Return the folder of adapters; `ApiError` (403) where adapters do not change."""
    folder = state_of(request).client.info.lora_folder
    if folder is None:
        raise ApiError(403, "adapters are not loaded while this server runs: it was started without --lora-folder")
    return Path(folder).expanduser().resolve()


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
