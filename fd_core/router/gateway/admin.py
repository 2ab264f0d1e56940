"""POST /register and /deregister, on the admin port and for workers that know the router's secret."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec
from aiohttp import web

from fd_core.errors import FdError
from fd_core.http.access.keys import KeyRing
from fd_core.http.bodies import BodyBudget
from fd_core.http.errors import ApiError, to_api_error
from fd_core.http.hosts import HostRules
from fd_core.router.gateway.requests.answers import error_response, json_response, read_body
from fd_core.router.gateway.requests.state import GatewayState
from fd_core.router.gateway.workers.watched import visit_of

_MAX_BODY_BYTES: Final = 16 * 1024


class _RegisterRequest(msgspec.Struct):
    url: str
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    instance: str | None = None


class RegisteredWorker(msgspec.Struct):
    """The answer to a worker that was registered or deregistered."""

    worker: str
    incarnation: int


_decoder: Final = msgspec.json.Decoder(_RegisterRequest)


class Admin:
    """Handler of the admin port."""

    def __init__(self, state: GatewayState, on_change: Callable[[], None]) -> None:
        """`on_change` is called when a worker came or went."""
        self._router = state.router
        self._ring = KeyRing([state.config.router_secret])
        self._on_change = on_change
        self._hosts = HostRules(state.config.admin_host, state.config.allowed_hosts, ())
        self._bodies = BodyBudget(_MAX_BODY_BYTES)
        self._pairs = state.ticket_key is not None

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        try:
            return await self._answer(request)
        except (ApiError, FdError) as error:
            return error_response(to_api_error(error), request.path)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        self._hosts.check(visit_of(request))
        if self._ring.find(request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")) is None:
            raise ApiError(
                401,
                "the router's secret is required: send the header 'Authorization: Bearer SECRET'",
                code="invalid_secret",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if request.path not in ("/register", "/deregister"):
            raise ApiError(404, "nothing is served at this path; there are /register and /deregister")
        if request.method != "POST":
            raise ApiError(405, "this path takes POST", headers={"Allow": "POST"})
        try:
            with self._bodies.share(request.headers.get("Content-Length"), _MAX_BODY_BYTES) as share:
                member = _decoder.decode(await read_body(request, share))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body cannot be read: {error}", code="invalid_body") from None
        if member.role != "mixed" and not self._pairs:
            raise ApiError(
                400,
                f"this router has no secret for pairs, so it takes no {member.role} workers: "
                "start it with --transfer-secret-file",
                param="role",
                code="wrong_role",
            )
        known, now = self._router.workers(), time.monotonic()
        if request.path == "/register":
            worker = self._router.register(member.url, member.role, now, instance=member.instance)
        elif (left := self._router.deregister(member.url, now)) is not None:
            worker = left
        else:
            raise ApiError(404, "no worker has this address", param="url", code="unknown_worker")
        if request.path == "/deregister" or worker not in known:
            self._on_change()
        return json_response(RegisteredWorker(worker.url, worker.incarnation))
