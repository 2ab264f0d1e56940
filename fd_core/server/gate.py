"""Middleware that every HTTP request passes: request id, API key, and the answer to unexpected errors."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from typing import Final

from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fd_core.server import kv_events
from fd_core.server.auth import KeyRing
from fd_core.server.batches.asgi import OWNER
from fd_core.server.doors.hosts import HostRules, Visit
from fd_core.server.draining import DRAINING_HEADER, Drain
from fd_core.server.errors import error_response, to_api_error, unavailable
from fd_core.server.metrics import ServerMetrics

__all__ = ["Gate", "request_id_of"]

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")

_ALWAYS: Final = frozenset({"/v1/abort_requests", "/ping"})
"""Paths that take POST and are served to the end."""
_LEAVING: Final = ((b"connection", b"close"), (DRAINING_HEADER.lower().encode(), b"1"))


def request_id_of(given: bytes) -> bytes:
    """Return the client's X-Request-Id if it is usable, else a fresh one."""
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


class Gate:
    """ASGI middleware. Sets `request.state.request_id`: the client's X-Request-Id if it is usable, else a fresh one.

    The id goes back in the response's header. `request.state.owner` says whose key was sent, see `KeyRing.owner`.
    `request.state.arrived` is when the request's head was read, in seconds
    of `time.perf_counter`. Nothing of a request but its path is ever logged here.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, hosts: HostRules, metrics: ServerMetrics, drain: Drain) -> None:
        self._app = app
        self._hosts = hosts
        self._drain = drain
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer for it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # answered as GET; the protocol, whose scope stays as it is, leaves the body out
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        request_id = request_id_of(headers.get(b"x-request-id", b""))
        scope.setdefault("state", {}).update(request_id=request_id.decode(), arrived=time.perf_counter())
        started, options = False, scope["method"] == "OPTIONS"
        added = [(b"x-request-id", request_id)]

        async def numbered(message: Message) -> None:
            nonlocal started
            if message.get("status") == 405:
                message = {**message, "headers": [*_without_allow(message), (b"allow", _methods(scope).encode())]}
            if options:
                message = _allowed(message)
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *added]
                if self._drain.leaving:
                    message["headers"] += _LEAVING
                self._metrics.answers[_path(scope), message["status"]] += 1
            await send(message)

        try:
            if OWNER not in scope:
                for name, value in self._hosts.check(_visit(scope, headers)).items():
                    added.append((name.lower().encode(), value.encode("latin-1")))
            # KV events have a secret of their own.
            if not options and scope["path"] != kv_events.PATH:
                sent = headers.get(b"authorization"), headers.get(b"x-api-key")
                scope["state"]["owner"] = scope[OWNER] if OWNER in scope else self._keys.check(scope["path"], *sent)
            if scope["method"] != "POST" or scope["path"] in _ALWAYS:
                await self._app(scope, receive, numbered)
            elif self._drain.refusing:
                raise unavailable("the server is shutting down", "draining", retry_after=5)
            else:
                with self._drain.runs():
                    await self._app(scope, receive, numbered)
        except Exception as error:  # noqa: BLE001  # the outermost edge: whatever happened, the client gets an answer
            answer = to_api_error(error)
            if started:
                raise ConnectionAbortedError("an answer broke off after it had begun") from None
            await error_response(answer, scope["path"])(scope, receive, numbered)


def _visit(scope: Scope, headers: Mapping[bytes, bytes]) -> Visit:
    def header(name: str) -> str | None:
        value = headers.get(name.lower().encode())
        return None if value is None else value.decode("latin-1")

    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return Visit.of(scope["method"], hosts, scope["server"][0] if scope["server"] else None, header)


def _allowed(message: Message) -> Message:
    """Turn the answer that a path does not take OPTIONS into one that says what the path takes; 404 stays."""
    if message["type"] == "http.response.body":
        return {**message, "body": b""}
    allowed = dict(message["headers"]).get(b"allow")
    if allowed is None:
        return {**message, "headers": [(b"content-length", b"0")]}
    return {**message, "status": 204, "headers": [(b"allow", allowed)]}


def _without_allow(message: Message) -> list[tuple[bytes, bytes]]:
    return [header for header in message.get("headers", ()) if header[0] != b"allow"]


def _methods(scope: Scope) -> str:
    """Return the methods that a path takes; each may have a route of its own."""
    methods = {"OPTIONS"}
    for method in ("DELETE", "GET", "POST"):
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in scope["app"].routes):
            methods.add(method)
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


def _path(scope: Scope) -> str:
    """Return the route's own path, so that clients cannot make up metric labels."""
    route = scope.get("route")
    path = getattr(route, "path", None)
    return path if isinstance(path, str) else "other"
