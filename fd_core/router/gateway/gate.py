"""The gate that every request passes: request id, API key, path, and a response to unexpected errors.

On the admin port, workers that know the router's secret POST /register and /deregister.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, Final, Literal

import msgspec
import numpy as np
from multidict import CIMultiDict
from prometheus_client import CONTENT_TYPE_LATEST

import fd_core
from fd_core.errors import FdError
from fd_core.http.access.control import ON_EVERY_WORKER, ROUTES, allow_header, find_route, limit_headers
from fd_core.http.access.keys import KeyRing
from fd_core.http.access.record import CLIENT_LEFT, USAGE_HEADER, RequestRecord, UsageMeter, log_access
from fd_core.http.bodies import BodyBudget, BodyShare
from fd_core.http.connections.connections import source_of
from fd_core.http.draining import DRAINING_HEADER
from fd_core.http.errors import ApiError, HealthAnswer, VersionAnswer, no_such_path, to_api_error, unavailable
from fd_core.http.headers import request_id_of
from fd_core.http.hosts import HostRules
from fd_core.http.pages.assembling import assemble, page_headers
from fd_core.router.attempts import Attempts
from fd_core.router.gateway.http1.clients import ClientRequest, WholeAnswer, error_answer, json_answer
from fd_core.router.gateway.requests.all_workers import ABORT_PATH, RESPONSES_PATH, abort, change_all, keeper
from fd_core.router.gateway.requests.forwarding import Exchange, read_body, to_worker
from fd_core.router.gateway.requests.route_requests import COMPUTES_NOTHING
from fd_core.router.gateway.requests.state import GatewayState
from fd_core.router.gateway.workers.health_checks import union
from fd_core.router.selection import RouteRequest
from fd_core.router.workers import ROLES, WorkerState
from fd_core.text.fair_thread import CLIENT

_KEPT_BY_WORKERS: Final = ("/v1/files", "/v1/batches")
_OLLAMA_LISTS: Final = ("/api/tags", "/api/ps")
_MAX_BODY_BYTES: Final = 16 * 1024


class RouterGate:
    """Handler of the gateway's port. It never logs any part of a request except in the access log."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state
        self._access = state.access
        config = state.config
        self._hosts = HostRules(config.host, config.allowed_hosts, config.allowed_origins)

    async def __call__(self, request: ClientRequest) -> WholeAnswer:
        """Answer one request."""
        given = request.headers.get("X-Request-Id", "").encode("utf-8", "surrogateescape")
        arrived, status = time.monotonic(), CLIENT_LEFT
        record = RequestRecord(request_id_of(given).decode())
        added = {"X-Request-Id": record.request_id}
        try:
            try:
                added |= self._hosts.check(request.visit())
                if request.method == "OPTIONS":
                    answer = WholeAnswer(204, headers=CIMultiDict(allow_header(request.path)))
                elif ROUTES[template := self._authorize(request, record)].forwarded:
                    answer = await self._forward(request, record, added)
                else:
                    answer = await self._answer(request, record, template)
            except ConnectionError:  # the client disconnected
                request.abort()
                return WholeAnswer(CLIENT_LEFT)
            except Exception as error:  # noqa: BLE001  # the outermost handler: the client gets a response to every error
                answer = error_answer(to_api_error(error), request.path)
                if request.started:
                    request.abort()
            self._finish(request, answer, record, added)
            status = answer.status
            return answer
        finally:
            if record.account is not None:
                record.close()
            if self._state.config.access_log:
                seconds = time.monotonic() - arrived
                log_access(request.remote, request.method, request.path, status, seconds, record)

    def _finish(
        self, request: ClientRequest, answer: WholeAnswer, record: RequestRecord, added: dict[str, str]
    ) -> None:
        """Add the headers that every answer gets, and count it."""
        if not request.started:
            answer.headers.update(added)
            if record.account is not None:
                answer.headers.update(limit_headers(record.account, time.monotonic()))
            if self._state.drain.leaving:
                answer.headers[DRAINING_HEADER] = "1"
        if self._state.drain.leaving:
            request.keep_alive = False
        found = find_route(request.path)
        # Clients cannot create label values.
        path = found[0] if found is not None and (found[1].forwarded or found[0] in PAGES) else "other"
        self._state.metrics.answers[path, answer.status] += 1

    def _authorize(self, request: ClientRequest, record: RequestRecord) -> str:
        """Fill in the record, and return the template of the request's route. Raises `ApiError`."""
        path = request.path
        if self._access.has_keys:
            sent = _header(request, "Authorization"), _header(request, "X-Api-Key")
            record.key = self._access.identify(request.method, path, *sent)
        CLIENT.set(source_of(request.connection.remote) if record.key is None else record.owner)
        template = self._access.authorize(record, request.method, path)
        if record.key is not None:
            self._access.enter(record, request.method, path, now=time.monotonic())
        return template

    async def _answer(self, request: ClientRequest, record: RequestRecord, template: str) -> WholeAnswer:
        path, shown = request.path, PAGES.get(template)
        if shown is not None:
            return await shown(self._state)
        if template.startswith("/v1/models"):
            return await self._list(path, to_worker(self._state, request.headers, record, "GET", "/v1/models"))
        if template in _OLLAMA_LISTS:
            headers = to_worker(self._state, request.headers, record, "GET", path)
            return json_answer({"models": await union(self._state, headers, path)})
        if template.startswith(_KEPT_BY_WORKERS):
            raise ApiError(
                404, "files and batches are stored per worker and not routed; send these requests to a worker"
            )
        if template == ABORT_PATH or template in ON_EVERY_WORKER:
            with self._share(request) as share:
                body = await read_body(request, share)
            headers = to_worker(self._state, request.headers, record, method="POST", path=path)
            act = abort if template == ABORT_PATH else change_all
            return await act(self._state, request.target, body, headers)
        raise no_such_path(path)

    def _share(self, request: ClientRequest) -> BodyShare:
        return self._state.bodies.share(request.headers.get("Content-Length"), self._state.config.max_body_bytes)

    async def _forward(self, request: ClientRequest, record: RequestRecord, added: Mapping[str, str]) -> WholeAnswer:
        if self._state.drain.refusing:
            raise unavailable("the router is shutting down", "draining", retry_after=5)
        share = self._share(request)
        self._state.drain.running += 1
        try:
            arrived = time.monotonic()
            body = await read_body(request, share)
            session = request.headers.get("X-Session-Id", "")[:256] or None
            headers, meter = (
                to_worker(self._state, request.headers, record, method=request.method, path=request.path),
                None,
            )
            if request.path in COMPUTES_NOTHING or request.method != "POST":
                asked = RouteRequest(np.zeros(1, np.int32), session, model=await self._state.reader.model(body))
            else:
                cost = None
                if record.account is not None and record.tokens_per_minute is not None:
                    kind, limit = request.headers.get("Content-Type", ""), record.tokens_per_minute
                    cost = await self._state.costs.cost(request.path, kind, body, limit=limit)
                    self._access.reserve(record, cost.most)
                asked = await self._state.reader.read(body, session, request.path)
                if record.key is not None:
                    length = asked.length if cost is None else cost.prompt
                    salt = self._access.salt(record.owner, asked.salt)
                    asked = msgspec.structs.replace(asked, salt=salt, prefill_tokens=length)
            if request.path.startswith(RESPONSES_PATH):
                home = await keeper(self._state, request, body, record=record)
                asked = msgspec.structs.replace(asked, home=home)
            if record.reservation is not None or self._state.config.access_log:
                headers[USAGE_HEADER], meter = "1", UsageMeter()
            exchange = Exchange(
                state=self._state,
                request=request,
                added=added,
                headers=headers,
                body=body,
                share=share,
                asked=asked,
                arrived=arrived,
                record=record,
                meter=meter,
                attempts=Attempts(self._state.router, asked),
            )
            spans = self._state.spans
            return await (exchange.forward() if spans is None else exchange.recorded(spans))
        finally:
            self._state.drain.running -= 1
            share.release()

    async def _list(self, path: str, headers: Mapping[str, str]) -> WholeAnswer:
        models: list[dict[str, Any]] = await union(self._state, headers)
        name = path.removeprefix("/v1/models").removeprefix("/")
        if not name:
            ends = {"first_id": models[0].get("id"), "last_id": models[-1].get("id")} if models else {}
            return json_answer({"object": "list", "data": models, **ends, "has_more": False})
        for model in models:
            if model.get("id") == name:
                return json_answer(model)
        raise ApiError(404, f"the model {name[:128]!r} does not exist", param="model", code="model_not_found")


def _header(request: ClientRequest, name: str) -> bytes | None:
    value = request.headers.get(name)
    return None if value is None else value.encode("utf-8", "surrogateescape")


async def health(state: GatewayState) -> WholeAnswer:
    """Answer 200 while the gateway is alive, and name failing background tasks."""
    return json_answer(HealthAnswer("ok", state.supervisor.failing or None))


async def ready(state: GatewayState) -> WholeAnswer:
    """Answer 200 while requests are served, 503 with the reason otherwise."""
    reason = _not_ready(state)
    return json_answer(HealthAnswer("not ready", reason), 503) if reason else await health(state)


async def version(_: GatewayState) -> WholeAnswer:
    """Return the version of fd_core."""
    return json_answer(VersionAnswer(fd_core.__version__))


async def metrics(state: GatewayState) -> WholeAnswer:
    """Return every metric in Prometheus' text format."""
    return WholeAnswer(200, await state.metrics.text(), CIMultiDict({"Content-Type": CONTENT_TYPE_LATEST}))


async def live_page(_: GatewayState) -> WholeAnswer:
    """Return the live page."""
    headers = CIMultiDict({"Content-Type": "text/html; charset=utf-8", **page_headers(_page())})
    return WholeAnswer(200, _page().encode(), headers)


async def status(state: GatewayState) -> WholeAnswer:
    """Return everything that the live page shows, as JSON."""
    snapshot, counts, config = state.router.snapshot(), state.metrics.counts, state.router.config
    shown: dict[str, Any] = msgspec.to_builtins(snapshot) | msgspec.to_builtins(counts)
    shown |= {
        "policies": {role: config.policy_of(role) for role in ROLES},
        "tally": msgspec.to_builtins(snapshot.tally),
        "block_tokens": config.cache_block_size,
        "prompts": state.reader.description,
        "not_ready": _not_ready(state),
        "now": time.monotonic(),
    }
    return json_answer(shown)


PAGES: Final[Mapping[str, Callable[[GatewayState], Awaitable[WholeAnswer]]]] = {
    "/": live_page,
    "/status": live_page,
    "/status.json": status,
    "/health": health,
    "/ping": health,
    "/ready": ready,
    **dict.fromkeys(("/version", "/api/version"), version),
    "/metrics": metrics,
}
"""Answers to GET requests that need no key; none of them holds a prompt, a text or a key."""


def _not_ready(state: GatewayState) -> str | None:
    if state.drain.leaving:
        return "the router is shutting down"
    if state.router.ready():
        return None
    healthy = any(each.state is WorkerState.HEALTHY for each in state.router.snapshot().workers)
    return "no mixed worker and no decode worker is available" if healthy else "no worker is healthy"


@cache
def _page() -> str:
    return assemble("fd_core.router.gateway.live_page", "fd_core router", own=("page.css", "live.js"), served=True)


class _RegisterRequest(msgspec.Struct):
    url: str
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    instance: str | None = None


class RegisteredWorker(msgspec.Struct):
    """Response to a worker that was registered or deregistered."""

    worker: str
    incarnation: int


_decoder: Final = msgspec.json.Decoder(_RegisterRequest)


class Admin:
    """Handler of the admin port."""

    def __init__(self, state: GatewayState, on_change: Callable[[], None]) -> None:
        """`on_change` is called when a worker registers or deregisters."""
        self._router = state.router
        self._ring = KeyRing([state.config.router_secret])
        self._on_change = on_change
        self._hosts = HostRules(state.config.admin_host, state.config.allowed_hosts, ())
        self._bodies = BodyBudget(_MAX_BODY_BYTES)
        self._pairs = state.ticket_key is not None

    async def __call__(self, request: ClientRequest) -> WholeAnswer:
        """Answer one request."""
        try:
            return await self._answer(request)
        except (ApiError, FdError) as error:
            return error_answer(to_api_error(error), request.path)

    async def _answer(self, request: ClientRequest) -> WholeAnswer:
        self._hosts.check(request.visit())
        if self._ring.find(request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")) is None:
            message = "the router's secret is required: send the header 'Authorization: Bearer SECRET'"
            raise ApiError(401, message, code="invalid_secret", headers={"WWW-Authenticate": "Bearer"})
        if request.path not in ("/register", "/deregister"):
            raise ApiError(404, "unknown path; the admin port serves /register and /deregister")
        if request.method != "POST":
            raise ApiError(405, "this path requires POST", headers={"Allow": "POST"})
        try:
            with self._bodies.share(request.headers.get("Content-Length"), _MAX_BODY_BYTES) as share:
                member = _decoder.decode(await read_body(request, share))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body cannot be read: {error}", code="invalid_body") from None
        if member.role != "mixed" and not self._pairs:
            message = (
                f"this router has no transfer secret and accepts no {member.role} workers; start it with "
                "--transfer-secret-file"
            )
            raise ApiError(400, message, param="role", code="wrong_role")
        known, now = self._router.workers(), time.monotonic()
        if request.path == "/register":
            worker = self._router.register(member.url, member.role, now, instance=member.instance)
        elif (left := self._router.deregister(member.url, now)) is not None:
            worker = left
        else:
            raise ApiError(404, "no worker is registered with this address", param="url", code="unknown_worker")
        if request.path == "/deregister" or worker not in known:
            self._on_change()
        return json_answer(RegisteredWorker(worker.url, worker.incarnation))
