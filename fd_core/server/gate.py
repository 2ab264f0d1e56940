"""Middleware that every HTTP request passes: request id, API key, and the answer to unexpected errors."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping
from typing import Final

from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fd_core.http.access.control import allow_header, limit_headers
from fd_core.http.access.record import CLIENT_LEFT, TENANT_HEADER, RequestRecord, Tenant, log_access, read_tenant
from fd_core.http.connections.connections import source_of
from fd_core.http.draining import DRAINING_HEADER
from fd_core.http.errors import ApiError, no_such_path, to_api_error, unavailable
from fd_core.http.headers import request_id_of
from fd_core.http.hosts import HostRules, Visit
from fd_core.server.batches.running import OWNER
from fd_core.server.state import ServerState
from fd_core.text.fair_thread import CLIENT

_ALWAYS: Final = frozenset({"/v1/abort_requests", "/ping"})
"""Paths that accept POST and are served while the server drains."""
_TENANT: Final = TENANT_HEADER.lower().encode()
_LEAVING: Final = ((b"connection", b"close"), (DRAINING_HEADER.lower().encode(), b"1"))


class Gate:
    """ASGI middleware. Sets `request.state.request_id`: the client's X-Request-Id if it is usable, else a fresh one.

    The id is returned in the response's header. `request.state.owner` is the owner of the key, see `ApiKey.owner`, ""
    without one. `request.state.record` is the request's `RequestRecord`. `request.state.arrived` is when the request's
    head was read, in seconds of `time.perf_counter`. No part of a request is logged here except in its access log.
    """

    def __init__(self, app: ASGIApp, state: ServerState, hosts: HostRules) -> None:
        self._app = app
        self._hosts = hosts
        self._client = state.client
        self._drain = state.drain
        self._access = state.access
        self._answers = state.metrics.answers
        self._access_log = state.config.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer for it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head = scope["method"] == "HEAD"
        if head:  # handled as GET; the protocol, whose scope is unchanged, omits the body
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        request_id = request_id_of(headers.get(b"x-request-id", b""))
        arrived, record = time.perf_counter(), RequestRecord(request_id.decode())
        state = scope.setdefault("state", {})
        state.update(request_id=record.request_id, arrived=arrived, record=record)
        status, ended = 0, False
        added = [(b"x-request-id", request_id)]

        def numbered(message: Message) -> Awaitable[None]:
            nonlocal status, ended
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                status = message["status"]
                version = (b"x-weight-version", self._client.info.weight_version.encode())
                message["headers"] = [*message.get("headers", ()), *added, version]
                if record.account is not None:
                    left = limit_headers(record.account, time.monotonic())
                    message["headers"] += [(name.encode(), value.encode()) for name, value in left.items()]
                if self._drain.leaving:
                    message["headers"] += _LEAVING
                path = getattr(scope.get("route"), "path", None)
                # The route's template, not the path: clients cannot create metric labels.
                self._answers[path if isinstance(path, str) else "other", status] += 1
            return send(message)

        try:
            if OWNER not in scope:
                hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
                visit = Visit(hosts, scope["server"][0] if scope["server"] else None)
                if b"origin" in headers:
                    visit = Visit.of(scope["method"], hosts, visit.address, Headers(raw=[*headers.items()]).get)
                for name, value in self._hosts.check(visit).items():
                    added.append((name.lower().encode(), value.encode("latin-1")))
            if scope["method"] == "OPTIONS":
                await Response(status_code=204, headers=allow_header(scope["path"]))(scope, receive, numbered)
                return
            self._enter(scope, "HEAD" if head else scope["method"], headers, record=record)
            if scope["method"] != "POST" or scope["path"] in _ALWAYS:
                await self._app(scope, receive, numbered)
            elif self._drain.refusing:
                raise unavailable("the server is shutting down", "draining", retry_after=5)
            else:
                self._drain.running += 1
                try:
                    await self._app(scope, receive, numbered)
                finally:
                    self._drain.running -= 1
        except Exception as error:  # noqa: BLE001  # the outermost handler: the client gets a response to every error
            answer = to_api_error(error)
            if status:
                raise ConnectionAbortedError("the response failed after its head was sent") from None
            await error_response(answer, scope["path"])(scope, receive, numbered)
        finally:
            if record.account is not None:
                record.close()
            if self._access_log:
                client = "batch" if OWNER in scope else scope["client"][0] if scope["client"] else "-"
                method = "HEAD" if head else scope["method"]
                seconds, path = time.perf_counter() - arrived, scope["path"]
                log_access(client, method, path, status if ended else CLIENT_LEFT, seconds, record)

    def _enter(self, scope: Scope, method: str, headers: Mapping[bytes, bytes], record: RequestRecord) -> None:
        """Identify the owner of the request and check its rights. Raises `ApiError`: 401, 403, 404, 405, 429."""
        access, path, owner = self._access, scope["path"], scope.get(OWNER)
        if owner is not None:
            record.key = access.of_owner(owner)
        elif access.has_keys or _TENANT in headers:
            sent = headers.get(b"authorization"), headers.get(b"x-api-key")
            record.key = access.identify(method, path, *sent)
            if _TENANT in headers:
                record.tenant = self._tenant(record, method, path, header=headers[_TENANT])
            owner = record.owner
        scope["state"]["owner"] = owner or ""
        CLIENT.set(owner or source_of(scope["client"][0] if scope["client"] else "-"))
        access.authorize(record, method, path)
        if record.key is not None:
            access.enter(record, method, path, now=time.monotonic())

    def _tenant(self, record: RequestRecord, method: str, path: str, header: bytes) -> Tenant | None:
        """Return the tenant that a router names. Raises `ApiError` (403) unless the sender's key signed the header."""
        if record.key is None and self._access.has_keys:  # an open path: nothing there depends on the tenant
            return None
        secret = None if record.key is None else record.key.digest
        tenant = read_tenant(secret, header, method, path=path, request_id=record.request_id)
        if path.startswith(("/v1/files", "/v1/batches")):
            tenant = None  # no router forwards these: a key split into tenants would multiply its quota
        if tenant is None:
            message = f"{TENANT_HEADER} is not signed with the request's API key; only routers may send this header"
            raise ApiError(403, message, kind="permission_error", code="bad_tenant")
        return tenant


def error_response(error: ApiError, path: str) -> Response:
    """Return the HTTP response for an error, in the format of the API that is served at `path`."""
    return Response(error.body_at(path), error.status, error.headers, media_type="application/json")


async def handle_error(request: Request, error: Exception) -> Response:
    """Return an error response for the client in the format of the API that it called."""
    if isinstance(error, HTTPException) and error.status_code == 404:  # from routing: no handler of a path raises it
        error = no_such_path(request.url.path)
    return error_response(to_api_error(error), request.url.path)
