"""The gateway's own pages: /health, /ready, /metrics, the live page and the JSON behind the live page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, Final

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

import fd_core
from fd_core.http.errors import HealthAnswer, VersionAnswer
from fd_core.http.pages.assembling import assemble, page_headers
from fd_core.router.gateway.requests.answers import json_response
from fd_core.router.gateway.requests.state import GatewayState
from fd_core.router.workers import ROLES, WorkerState


async def health(state: GatewayState) -> web.Response:
    """Answer 200 while the gateway lives, and name background tasks that fail."""
    return json_response(HealthAnswer("ok", state.supervisor.failing or None))


async def ready(state: GatewayState) -> web.Response:
    """Answer 200 while requests are served, 503 with the reason otherwise."""
    reason = _not_ready(state)
    return json_response(HealthAnswer("not ready", reason), 503) if reason else await health(state)


async def version(_: GatewayState) -> web.Response:
    """Return the version of fd_core."""
    return json_response(VersionAnswer(fd_core.__version__))


async def metrics(state: GatewayState) -> web.Response:
    """Return every metric in Prometheus' text format."""
    return web.Response(body=await state.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def live_page(_: GatewayState) -> web.Response:
    """Return the live page."""
    return web.Response(text=_page(), content_type="text/html", headers=page_headers(_page()))


async def status(state: GatewayState) -> web.Response:
    """Return everything that the live page shows, as JSON."""
    snapshot, counts, config = state.router.snapshot(), state.metrics.counts, state.router.config
    shown: dict[str, Any] = msgspec.to_builtins(snapshot) | msgspec.to_builtins(counts)
    shown |= {
        "policies": {role: config.policy_of(role) for role in ROLES},
        "tally": msgspec.to_builtins(snapshot.tally),
        "block_tokens": config.cache_block_size,
        "prompts": state.reader.description,
        "not_ready": _not_ready(state),
    }
    return json_response(shown)


PAGES: Final[Mapping[str, Callable[[GatewayState], Awaitable[web.Response]]]] = {
    "/": live_page,
    "/status": live_page,
    "/status.json": status,
    "/health": health,
    "/ping": health,
    "/ready": ready,
    "/version": version,
    "/metrics": metrics,
}
"""Answers to GET requests that need no key; none of them holds a prompt, a text or a key."""


def _not_ready(state: GatewayState) -> str | None:
    """Return the reason for which requests are refused; None if they are served."""
    if state.drain.leaving:
        return "the router is shutting down"
    if state.router.ready():
        return None
    healthy = any(each.state is WorkerState.HEALTHY for each in state.router.snapshot().workers)
    return "neither a mixed worker nor a decode worker can be used" if healthy else "no worker is healthy"


@cache
def _page() -> str:
    return assemble("fd_core.router.gateway.live_page", shared=("theme.css", "curves.js"), own=("page.css", "live.js"))
