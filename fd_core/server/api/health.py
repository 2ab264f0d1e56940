"""GET /health, /ping, /ready, /load, /version, /get_model_info, /metrics, the page at / and its /status.json."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

import fd_core
from fd_core.disagg.ticket import KV_PORT_HEADER, ROLE_HEADER
from fd_core.http.errors import HealthAnswer, VersionAnswer
from fd_core.http.pages.assembling import assemble, page_headers
from fd_core.server.api import kv_events
from fd_core.server.api.openapi import endpoint, json_response
from fd_core.server.schemas.responses import LoadAnswer, ModelInfoAnswer
from fd_core.server.state.state import state_of

router = APIRouter()


@router.get("/health", **endpoint("Whether the server lives", None, HealthAnswer, errors=(), unhealthy=True))
async def health(request: Request) -> Response:
    """Answer 200 unless the engine is dead, also while the server shuts down.

    Of several engines one may be on its way back; it is named.
    """
    state = state_of(request)
    answer = _health(state.degraded, "ok" if state.client.healthy else "dead")
    answer.headers["X-Instance"] = state.incarnation
    if kv_events.offers(state):
        answer.headers[kv_events.OFFER_HEADER] = "1"
    answer.headers[ROLE_HEADER] = state.client.info.role
    if state.client.info.kv_port is not None:
        answer.headers[KV_PORT_HEADER] = str(state.client.info.kv_port)
    return answer


@router.get("/ready", **endpoint("Whether requests are served", None, HealthAnswer, errors=(), unhealthy=True))
async def ready(request: Request) -> Response:
    """Answer 200 while requests are served, by whichever engine, 503 with the reason otherwise."""
    state = state_of(request)
    reason = state.not_ready()
    return _health(state.degraded, "ok") if reason is None else _health(reason, "not ready")


@router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
async def ping(request: Request) -> Response:
    """Answer as /health, where SageMaker and others look for it."""
    return await health(request)


@router.get("/load", **endpoint("How busy the server is", None, LoadAnswer, errors=()))
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
    return Response(state_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """Return a page that shows what the server does now, and a playground."""
    return Response(_page(), headers=page_headers(_page()), media_type="text/html")


@router.get("/status.json", include_in_schema=False)
async def status(request: Request) -> Response:
    """Return everything that the page shows, as JSON; no prompt, text or key is in it."""
    state = state_of(request)
    shown: dict[str, Any] = {
        "version": fd_core.__version__,
        "models": tuple(state.names),
        "not_ready": state.not_ready(),
        "missing": state.degraded,
        "engine": state.client.info,
        "stats": state.client.stats,
        "seconds": state.metrics.durations(),
        "outcomes": state.metrics.outcomes,
    }
    return json_response(shown, {"Cache-Control": "no-store"})


def _health(reason: str, status: str) -> Response:
    return json_response(HealthAnswer(status, reason or None), status=200 if status == "ok" else 503)


@cache
def _page() -> str:
    shared = ("theme.css", "curves.js")
    return assemble("fd_core.server.live_page", shared=shared, own=("page.css", "live.js", "playground.js"))
