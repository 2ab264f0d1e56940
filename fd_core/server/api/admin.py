"""Operator's endpoints: abort requests, load and unload adapters, health, metrics and the live page."""

from __future__ import annotations

import asyncio
import time
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import fd_core
from fd_core.disagg.ticket import KV_PORT_HEADER, ROLE_HEADER
from fd_core.engine.clients.client import ActiveRequest
from fd_core.http.access.keys import KeyRing
from fd_core.http.access.record import RequestRecord
from fd_core.http.errors import ApiError, HealthAnswer, VersionAnswer, invalid, unavailable
from fd_core.http.pages.api_docs.page import api_docs_page
from fd_core.http.pages.assembling import assemble, page_headers
from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.schemas.requests import AbortRequest, LoadAdapterRequest, UnloadAdapterRequest
from fd_core.server.schemas.responses import (
    AbortAnswer,
    AdapterAnswer,
    LoadAnswer,
    ModelInfoAnswer,
    RequestCard,
    RequestListAnswer,
)
from fd_core.server.state import ServerState, state_of
from fd_core.types import PHASE_NAMES, PHASE_TITLES, Phase
from fd_core.types.kv_events import KVPage

router = APIRouter(route_class=DirectRoute)
_ABORT: Final = BodyFormat(AbortRequest)
_LOAD: Final = BodyFormat(LoadAdapterRequest)
_UNLOAD: Final = BodyFormat(UnloadAdapterRequest)
KV_EVENTS_PATH: Final = "/kv_events"
OFFER_HEADER: Final = "X-KV-Events"
"""Header in the response of /health: this server publishes KV events."""
WAIT_SECONDS: Final = 10.0
"""Timeout of a poll without new events, in seconds."""


@router.post(
    "/v1/abort_requests", **endpoint("Abort requests", AbortRequest, AbortAnswer, example={"req_ids": ["cmpl-1"]})
)
async def abort_requests(request: Request) -> Response:
    """Abort requests by the `id` of their response or by their X-Request-Id, or all of them.

    Their clients receive the text so far, with finish reason `length` and stop reason `abort`. With API keys, each key
    may abort its own requests; the requests of other keys, and `abort_all`, need an admin key. Without API keys, every
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
        raise invalid('specify either {"req_ids": ["..."]} or {"abort_all": true}', "req_ids")
    return json_response(answer, headers)


@router.get("/v1/requests", **endpoint("List requests in flight", None, RequestListAnswer))
async def list_requests(request: Request) -> Response:
    """List requests that have not ended, with their wait reasons, and without prompts and texts.

    With API keys, each key gets the requests that it may abort: its own, and with an admin key all.
    """
    state = state_of(request)
    record: RequestRecord = request.state.record
    reached = set(state.active.all_ids(record.may_abort))
    active = [each for each in await state.client.requests() if each.request_id in reached]
    answer = RequestListAnswer([_card(state.active.request_id(each.request_id), each) for each in active])
    return json_response(answer, {"Cache-Control": "no-store"})


def _card(name: str, request: ActiveRequest) -> RequestCard:
    doing = request.activity
    return RequestCard(
        id=name,
        state=None if doing is None else doing.state,
        wait_reason=None if doing is None or doing.phase is Phase.COMPUTING else PHASE_NAMES[doing.phase],
        prompt_tokens=request.prompt_tokens,
        generated_tokens=request.generated_tokens,
        seconds=request.seconds,
    )


@router.post(
    "/v1/load_lora_adapter",
    **endpoint(
        "Load a LoRA adapter",
        LoadAdapterRequest,
        AdapterAnswer,
        example={"lora_name": "my-adapter", "lora_path": "folder"},
    ),
)
async def load_adapter(request: Request) -> Response:
    """Serve the adapter in a folder below --lora-folder under a separate name, as vLLM does.

    To load what the name stands for already changes nothing.
    """
    folder = _adapter_folder(request)
    state, body, headers = await _LOAD.read(request)
    if (found := state.names.get(body.lora_name)) is not None and not found.adapter:
        raise invalid(f"the name {body.lora_name!r} is already in use", "lora_name")
    place = await asyncio.to_thread(inside, folder, body.lora_path, "lora_path", "--lora-folder")
    await state.client.change_adapters(body.lora_name, str(place))
    return json_response(AdapterAnswer(f"the adapter {body.lora_name!r} is loaded"), headers)


@router.post(
    "/v1/unload_lora_adapter",
    **endpoint("Unload a LoRA adapter", UnloadAdapterRequest, AdapterAnswer, example={"lora_name": "my-adapter"}),
)
async def unload_adapter(request: Request) -> Response:
    """Unload an adapter: new requests for it are rejected, running ones continue until they finish."""
    _adapter_folder(request)
    state, body, headers = await _UNLOAD.read(request)
    found = state.names.get(body.lora_name)
    if found is None or not found.adapter:
        raise ApiError(404, f"no adapter named {body.lora_name!r} is loaded", param="lora_name", code="model_not_found")
    await state.client.change_adapters(body.lora_name, None)
    return json_response(AdapterAnswer(f"the adapter {body.lora_name!r} is unloaded"), headers)


def _adapter_folder(request: Request) -> Path:
    """Return the folder of adapters; `ApiError` (403) if loading at run time is disabled."""
    return allowed_folder(state_of(request).client.info.lora_folder, "adapters", "--lora-folder")


def allowed_folder(folder: str | None, what: str, flag: str) -> Path:
    """Return the folder that the operator allowed; `ApiError` (403) if loading at run time is disabled."""
    if folder is None:
        raise ApiError(403, f"{what} cannot be loaded at run time; start the server with {flag}")
    return Path(folder).expanduser().resolve()


def inside(folder: Path, asked: str, param: str, flag: str) -> Path:
    """Return the requested folder with links resolved; `ApiError` (400) if it is not inside `folder`."""
    try:
        place = (folder / asked).resolve()
        inside = place != folder and place.is_relative_to(folder) and place.is_dir()
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise invalid(f"{param} must be a folder below {flag}", param)
    return place


@router.get("/health", **endpoint("Check that the server is alive", None, HealthAnswer, errors=(), unhealthy=True))
async def health(request: Request) -> Response:
    """Answer 200 unless the engine is dead, also while the server shuts down. Of several engines one may be restarting;
    it is named.
    """
    state = state_of(request)
    answer = _health(state.degraded, "ok" if state.client.healthy else "dead")
    answer.headers["X-Instance"] = state.incarnation
    if _offers(state):
        answer.headers[OFFER_HEADER] = "1"
    answer.headers[ROLE_HEADER] = state.client.info.role
    if state.client.info.kv_port is not None:
        answer.headers[KV_PORT_HEADER] = str(state.client.info.kv_port)
    return answer


@router.get("/ready", **endpoint("Check that requests are accepted", None, HealthAnswer, errors=(), unhealthy=True))
async def ready(request: Request) -> Response:
    """Answer 200 while requests are served, by any of the engines, 503 with the reason otherwise."""
    state = state_of(request)
    reason = state.not_ready()
    return _health(state.degraded, "ok") if reason is None else _health(reason, "not ready")


@router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
async def ping(request: Request) -> Response:
    """Answer as /health, at the path that SageMaker and others poll."""
    return await health(request)


@router.get("/load", **endpoint("Get the load of the server", None, LoadAnswer, errors=()))
async def load(request: Request) -> Response:
    """Return how many requests run and wait."""
    client = state_of(request).client
    slots = client.stats.scheduler.slots
    return json_response(LoadAnswer(client.active_requests, slots.running + slots.loading, slots.waiting))


@router.get("/get_model_info", **endpoint("The model", None, ModelInfoAnswer))
async def get_model_info(request: Request) -> Response:
    """Describe the model as SGLang does."""
    info = state_of(request).client.info
    return json_response(ModelInfoAnswer(info.model, info.model, True, info.max_model_len, info.architecture))


@router.get("/version", **endpoint("The version", None, VersionAnswer, errors=()))
async def version() -> Response:
    """Return the version of fd_core."""
    return json_response(VersionAnswer(fd_core.__version__))


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Return every metric in Prometheus' text format."""
    return Response(generate_latest(state_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """Return a page that shows the current state of the server, and a playground."""
    return Response(_page(), headers=page_headers(_page()), media_type="text/html")


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """Return a page that renders the OpenAPI document."""
    page = api_docs_page()
    return Response(page, headers=page_headers(page), media_type="text/html")


@router.get("/status.json", include_in_schema=False)
async def status(request: Request) -> Response:
    """Return everything that the page shows, as JSON; no prompt, text or key is in it."""
    state = state_of(request)
    shown: dict[str, Any] = {
        "version": fd_core.__version__,
        "models": tuple(state.names),
        "images": 0 if state.images is None else state.config.limit_mm_per_prompt.image,
        "not_ready": state.not_ready(),
        "missing": state.degraded,
        "engine": state.client.info,
        "stats": state.client.stats,
        "seconds": state.metrics.durations(),
        "outcomes": state.metrics.outcomes,
    }
    return json_response(shown, {"Cache-Control": "no-store"})


@router.get("/history.json", include_in_schema=False)
async def history(request: Request) -> Response:
    """Return the figures of the last hours, which the page draws."""
    return json_response(state_of(request).history.shown(time.monotonic()), {"Cache-Control": "no-store"})


def _health(reason: str, status: str) -> Response:
    return json_response(HealthAnswer(status, reason or None), status=200 if status == "ok" else 503)


@cache
def _page() -> str:
    own = ("page.css", "live.js", "playground.js")
    waits = msgspec.json.encode(PHASE_TITLES).decode()
    return assemble("fd_core.server.live_page", "fd_core", own=own, values={"waits": waits}, served=True)


def _offers(state: ServerState) -> bool:
    return state.client.kv_log is not None and bool(state.config.router_secret)


@router.get(KV_EVENTS_PATH, include_in_schema=False)
async def kv_events(request: Request) -> Response:
    """Answer with the events from number `after` on, once there are some; without it with all that is held.

    They hold token ids, and so prompts: the answer is only for the secret that router and workers share.
    """
    state = state_of(request)
    kv_log = state.client.kv_log
    if kv_log is None or not _offers(state):
        raise ApiError(404, "this server publishes no KV events; start it with --kv-events and --router-secret-file")
    if KeyRing([state.config.router_secret]).find(request.headers.get("authorization", "").encode()) is None:
        message = "the router's secret is required: send the header 'Authorization: Bearer SECRET'"
        raise ApiError(403, message, code="invalid_secret")
    given = request.query_params.get("after")
    if given is not None and not (given.isascii() and given.isdecimal() and len(given) <= 18):
        raise invalid("after must be the number of an event", "after")
    # The number may be one of an earlier process at this address.
    after = int(given) if given is not None and request.query_params.get("instance") == state.incarnation else None
    await kv_log.wait(after, WAIT_SECONDS)
    if kv_log.closed:
        raise unavailable("the server is shutting down", "draining", retry_after=5)
    number, events = kv_log.read(after)
    page = KVPage(
        instance=state.incarnation,
        reading=state.prompt_reader.fingerprint,
        block_size=kv_log.block_size,
        next=number,
        events=events,
        engines=kv_log.engines,
    )
    return Response(msgspec.msgpack.encode(page), media_type="application/msgpack")
