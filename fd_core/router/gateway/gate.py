"""The gate that every request passes: request id, API key, path, and an answer to errors that nobody expected."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from aiohttp import web

from fd_core.router.gateway.aborting import ABORT_PATH, abort
from fd_core.router.gateway.answers import error_response, json_response
from fd_core.router.gateway.body import read_body
from fd_core.router.gateway.forwarding import Exchange
from fd_core.router.gateway.headers import to_worker
from fd_core.router.gateway.kept_responses import RESPONSES_PATH, keeper
from fd_core.router.gateway.models import union
from fd_core.router.gateway.pages import PAGES
from fd_core.router.gateway.state import GatewayState
from fd_core.router.gateway.watched import visit_of
from fd_core.router.selection import RouteRequest
from fd_core.server.access.access_log import CLIENT_LEFT, log_access
from fd_core.server.access.control import limit_headers
from fd_core.server.access.record import RequestRecord
from fd_core.server.access.usage import USAGE_HEADER, UsageMeter
from fd_core.server.doors.bodies import BodyShare
from fd_core.server.doors.connections import source_of
from fd_core.server.doors.hosts import HostRules
from fd_core.server.draining import DRAINING_HEADER
from fd_core.server.errors import ApiError, no_such_path, to_api_error, unavailable
from fd_core.server.gate import request_id_of
from fd_core.text.fair_thread import CLIENT

__all__ = ["RouterGate"]

_PLACED: Final = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/responses", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/tokenize", "/detokenize"),
        *("/tokenizer_info", "/get_model_info"),
    }
)
"""Paths that have their own value of the label `path` in the metrics; clients cannot make up others."""
_KEPT_BY_WORKERS: Final = ("/v1/files", "/v1/batches")
_ASKED: Final = frozenset({"/tokenizer_info", "/get_model_info"})
"""Paths that are read, and where each worker says the same."""
_COMPUTES_NOTHING: Final = _ASKED | {"/v1/messages/count_tokens", "/tokenize", "/detokenize"}
"""Paths whose text leaves nothing in a worker's cache, and so is no prompt to the router."""


class RouterGate:
    """Handler of the gateway's port. Nothing of a request but its access log is ever logged here."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state
        self._access = state.access
        config = state.config
        self._hosts = HostRules(config.host, config.allowed_hosts, config.allowed_origins)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        given = request.headers.get("X-Request-Id", "").encode("utf-8", "surrogateescape")
        arrived, status = time.monotonic(), CLIENT_LEFT
        record = RequestRecord(request_id_of(given).decode())
        try:
            answer = await self._guarded(request, record)
            status = answer.status
            return answer
        finally:
            record.close()
            if self._state.config.access_log:
                seconds = time.monotonic() - arrived
                log_access(request.remote or "-", request.method, request.path, status, seconds, record)

    async def _guarded(self, request: web.BaseRequest, record: RequestRecord) -> web.StreamResponse:
        """Return an answer, whatever happens."""
        added = {"X-Request-Id": record.request_id}
        answer: web.StreamResponse
        try:
            added |= self._hosts.check(visit_of(request))
            answer = await self._answer(request, record, added)
        except ConnectionError:  # the client is gone: nobody reads an answer
            request.protocol.force_close()
            return web.Response(status=CLIENT_LEFT)
        except Exception as error:  # noqa: BLE001  # the outermost edge: whatever happened, the client gets an answer
            answer = error_response(to_api_error(error), request.path)
            if request.writer.output_size > 0:
                request.protocol.force_close()
        if not answer.prepared:
            answer.headers.update(added)
            answer.headers.update(limit_headers(record.account, time.monotonic()))
            if self._state.drain.leaving:
                answer.headers[DRAINING_HEADER] = "1"
        if self._state.drain.leaving:
            answer.force_close()
        path = request.path if request.path in _PLACED or request.path in PAGES else "other"
        self._state.metrics.answers[path, answer.status] += 1
        return answer

    async def _answer(
        self, request: web.BaseRequest, record: RequestRecord, added: dict[str, str]
    ) -> web.StreamResponse:
        path = request.path
        if request.method == "OPTIONS":
            return _methods_of(path)
        sent = _header(request, "Authorization"), _header(request, "X-Api-Key")
        record.key = self._access.identify(request.method, path, *sent)
        CLIENT.set(record.owner or source_of(request.remote or "-"))
        self._access.enter(record, request.method, path, time.monotonic())
        shown = PAGES.get(path)
        if shown is not None:
            if request.method not in ("GET", "HEAD"):
                raise _wrong_method(("GET",))
            return await shown(self._state)
        if path == "/v1/models" or path.startswith("/v1/models/"):
            if request.method not in ("GET", "HEAD"):
                raise _wrong_method(("GET",))
            return await self._list(path, to_worker(self._state, request.headers, record.request_id))
        methods = _forwarded(path)
        if not methods:
            raise no_such_path(path)
        if path.startswith(_KEPT_BY_WORKERS):
            raise ApiError(404, "each worker keeps files and batches of its own; send these requests to a worker")
        if request.method not in methods:
            raise _wrong_method(methods)
        if path == ABORT_PATH:
            with self._share(request) as share:
                body = await read_body(request, share)
            headers = to_worker(self._state, request.headers, record.request_id)
            return await abort(self._state, body, headers, record)
        if self._state.drain.refusing:
            raise unavailable("the router is shutting down", "draining", retry_after=5)
        if self._state.active.of_others(record.request_id, record.owner):
            # Whoever shares an id could abort the other's request.
            added["X-Request-Id"] = record.request_id = request_id_of(b"").decode()
        ids = self._state.active.enter(record.request_id, 1, record.owner)
        try:
            with self._state.drain.runs(), self._share(request) as share:
                return await self._forward(request, record, added, share)
        finally:
            self._state.active.leave(record.request_id, ids)

    def _share(self, request: web.BaseRequest) -> BodyShare:
        return self._state.bodies.share(request.headers.get("Content-Length"), self._state.config.max_body_bytes)

    async def _forward(
        self, request: web.BaseRequest, record: RequestRecord, added: Mapping[str, str], share: BodyShare
    ) -> web.StreamResponse:
        arrived = time.monotonic()
        body = await read_body(request, share)
        session = request.headers.get("X-Session-Id", "")[:256] or None
        headers, meter = to_worker(self._state, request.headers, record.request_id), None
        if request.path in _COMPUTES_NOTHING or request.method != "POST":
            asked = RouteRequest(np.zeros(1, np.int32), session, model=await self._state.reader.model(body))
        else:
            asked = await self._state.reader.read(body, session)
            self._access.reserve(record, asked.length + asked.output_tokens)
        home = await keeper(self._state, request.path, body, headers)
        if home is not None:
            asked = replace(asked, home=home)
        if record.reservation is not None or self._state.config.access_log:
            headers[USAGE_HEADER], meter = "1", UsageMeter()
        exchange = Exchange(
            state=self._state,
            request=request,
            request_id=record.request_id,
            added=added,
            target=request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs,
            headers=headers,
            body=body,
            share=share,
            asked=asked,
            arrived=arrived,
            record=record,
            meter=meter,
        )
        return await exchange.forward()

    async def _list(self, path: str, headers: Mapping[str, str]) -> web.Response:
        models: list[dict[str, Any]] = await union(self._state, headers)
        name = path.removeprefix("/v1/models").removeprefix("/")
        if not name:
            ends = {"first_id": models[0].get("id"), "last_id": models[-1].get("id")} if models else {}
            return json_response({"object": "list", "data": models, **ends, "has_more": False})
        for model in models:
            if model.get("id") == name:
                return json_response(model)
        raise ApiError(404, f"the model {name[:128]!r} does not exist", param="model", code="model_not_found")


def _forwarded(path: str) -> tuple[str, ...]:
    """Return the methods with which a path goes to workers."""
    if path in _ASKED:
        return ("GET", "HEAD")
    if path.startswith(RESPONSES_PATH + "/") and ".." not in path:
        return ("DELETE", "GET", "HEAD")
    return ("POST",) if (path.startswith("/v1/") or path in _PLACED) and ".." not in path else ()


def _methods_of(path: str) -> web.Response:
    """Say which methods a path takes; whoever asks needs no key."""
    read = path in PAGES or path == "/v1/models" or path.startswith("/v1/models/")
    methods = ("GET", "HEAD") if read else _forwarded(path)
    if not methods:
        raise no_such_path(path)
    return web.Response(status=204, headers={"Allow": ", ".join(sorted((*methods, "OPTIONS")))})


def _header(request: web.BaseRequest, name: str) -> bytes | None:
    value = request.headers.get(name)
    return None if value is None else value.encode("utf-8", "surrogateescape")


def _wrong_method(allowed: Sequence[str]) -> ApiError:
    return ApiError(405, f"this path takes {', '.join(allowed)}", headers={"Allow": ", ".join(allowed)})
