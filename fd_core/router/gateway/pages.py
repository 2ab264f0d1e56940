"""The gateway's own pages: /health, /ready, /metrics, the live page and the JSON behind the live page."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

import fd_core
from fd_core.router.gateway.answers import json_response
from fd_core.router.gateway.metrics import GatewayMetrics
from fd_core.router.router import Router
from fd_core.router.workers import ROLES, WorkerState
from fd_core.server.response_schemas import HealthAnswer, VersionAnswer

__all__ = ["Pages"]

_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Pages:
    """Answers to GET requests; none of them holds a prompt, a text or a key."""

    def __init__(self, router: Router, metrics: GatewayMetrics) -> None:
        self._router = router
        self._metrics = metrics
        self.draining = False
        self.prompts = ""
        """How prompts are compared, in words."""

    def health(self) -> web.Response:
        """Answer 200 while the gateway lives."""
        return json_response(HealthAnswer("ok"))

    def ready(self) -> web.Response:
        """Answer 200 while requests are served, 503 with the reason otherwise."""
        reason = self.not_ready()
        return json_response(
            HealthAnswer("ok") if reason is None else HealthAnswer("not ready", reason), 503 if reason else 200
        )

    def not_ready(self) -> str | None:
        """Return the reason for which requests are refused; None if they are served."""
        if self.draining:
            return "the router is shutting down"
        if self._router.ready():
            return None
        healthy = any(each.state is WorkerState.HEALTHY for each in self._router.snapshot().workers)
        return "neither a mixed worker nor both sides of a pair can be used" if healthy else "no worker is healthy"

    def version(self) -> web.Response:
        """Return the version of fd_core."""
        return json_response(VersionAnswer(fd_core.__version__))

    def metrics(self) -> web.Response:
        """Return every metric in Prometheus' text format."""
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def page(self) -> web.Response:
        """Return the live page."""
        return web.Response(
            body=_page(), content_type="text/html", charset="utf-8", headers={"Content-Security-Policy": _PAGE_POLICY}
        )

    def status(self) -> web.Response:
        """Return everything that the live page shows, as JSON."""
        snapshot, counts = self._router.snapshot(), self._metrics.counts
        shown: dict[str, Any] = msgspec.to_builtins(snapshot)
        config = self._router.config
        shown |= {
            "policies": {role: config.policy_of(role) for role in ROLES},
            "tally": msgspec.to_builtins(snapshot.tally),
            "transfers": counts.transfers,
            "block_tokens": config.cache_block_size,
            "prompts": self.prompts,
            "not_ready": self.not_ready(),
            "disconnects": counts.disconnects,
            "attempts_lost": counts.attempts_lost,
            "streams_broken": counts.streams_broken,
        }
        return json_response(shown)


@cache
def _page() -> bytes:
    return files(__package__).joinpath("page.html").read_bytes()
