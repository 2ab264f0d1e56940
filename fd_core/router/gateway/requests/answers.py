"""Requests and answers in terms of aiohttp: bodies within bounds, headers that are passed on, the gateway's answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, get_args

import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from fd_core.disagg import keys
from fd_core.disagg.ticket import OUTCOME_HEADER, TICKET_HEADER, sign_ticket
from fd_core.errors import ConfigError
from fd_core.http.access.record import RequestRecord
from fd_core.http.access.tenants import TENANT_HEADER, Tenant, sign_tenant
from fd_core.http.access.usage import USAGE_HEADER
from fd_core.http.bodies import BodyShare
from fd_core.http.draining import DRAINING_HEADER
from fd_core.http.errors import ApiError, unavailable
from fd_core.http.headers import refuse_encoding
from fd_core.router.config import GatewayConfig
from fd_core.router.gateway.requests.state import GatewayState
from fd_core.router.selection import NoWorker, Selection
from fd_core.types import PrefillOutcome


def json_response(value: Any, status: int = 200) -> web.Response:
    """Return a value as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(error: ApiError, path: str) -> web.Response:
    """Return an error as clients of the API at `path` expect it."""
    body = error.body_at(path)
    return web.Response(body=body, status=error.status, headers=error.headers, content_type="application/json")


def error_event(error: ApiError, path: str) -> bytes:
    """Return an error as the last event of a stream from `path`, which no `[DONE]` follows."""
    return b"event: error\ndata: " + error.body_at(path) + b"\n\n"


def refusal(answer: NoWorker) -> ApiError:
    """Return the error for a client whose request got no worker."""
    wait = answer.retry_after if answer.retry_after is not None else 1.0
    seconds = max(1, math.ceil(wait))
    if answer.status == 503:
        return unavailable(answer.message, answer.reason, retry_after=seconds)
    kind = "rate_limit_error" if answer.status == 429 else "server_error"
    headers = {"Retry-After": str(seconds)} if answer.status == 429 or answer.retry_after is not None else {}
    return ApiError(answer.status, answer.message, kind=kind, code=answer.reason, headers=headers)


def lost() -> ApiError:
    """Return the error for a client whose answer broke off: the client may repeat the request, the gateway must not."""
    message = "the worker was lost while it answered; the answer is not complete, repeat the request"
    return ApiError(502, message, kind="server_error", code="worker_lost")


async def read_body(request: web.BaseRequest, share: BodyShare) -> bytes:
    """Return the body. Raises `ApiError`: 415 if it is compressed, 400 if it breaks off, and beyond its share."""
    refuse_encoding(request.headers.getall("Content-Encoding", []))
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    parts: list[bytes] = []
    try:
        while part := await request.content.readany():
            share.received(len(part))
            parts.append(part)
    except web.RequestPayloadError as error:
        raise ApiError(400, "the body broke off or is not framed as announced", code="invalid_body") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


_HOP_BY_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade"),
    }
)
"""Headers that belong to one connection (RFC 9110, section 7.6.1)."""
_ROUTERS_OWN: Final = frozenset(each.lower() for each in (TICKET_HEADER, OUTCOME_HEADER, USAGE_HEADER, TENANT_HEADER))
"""Headers that only a router may send: a client could send a worker to an address of its choice, or act for another."""
_REQUEST_ONLY: Final = _HOP_BY_HOP | _ROUTERS_OWN | {"host", "origin", "content-length", "expect", "x-request-id"}
_ANSWER_ONLY: Final = _HOP_BY_HOP | {"content-length", "date", "server", "x-request-id", DRAINING_HEADER.lower()}
AUTO_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that the HTTP client library would add by itself."""


def to_worker(
    state: GatewayState, given: CIMultiDictProxy[str], record: RequestRecord, method: str, path: str
) -> CIMultiDict[str]:
    """Return the headers of a request to a worker; the client's API key goes on unless it is the gateway's.

    Of a key of the gateway's, the tenant goes on, signed for this method and this decoded path.
    """
    headers = _without(given, _REQUEST_ONLY)
    headers["X-Request-Id"] = record.request_id
    if record.key is not None:
        tenant = Tenant.of(record.key)
        headers[TENANT_HEADER] = sign_tenant(state.worker_secret, tenant, method, path, record.request_id)
    if state.config.asks_for_keys:
        headers.popall("Authorization", None)
    if state.config.asks_for_keys or "Authorization" in state.own_headers:
        headers.popall("X-Api-Key", None)
    headers.update(state.own_headers)
    return headers


def to_client(given: CIMultiDictProxy[str], added: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers of the answer to the client, `added` in place of the worker's of the same names."""
    headers = _without(given, _ANSWER_ONLY)
    headers.update(added)
    return headers


def _without(given: CIMultiDictProxy[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    connection = given.get("Connection")
    if connection is not None:
        dropped = dropped | {name.strip().lower() for name in connection.split(",")}
    return CIMultiDict((name, value) for name, value in given.items() if name.lower() not in dropped)


_NOT_TOLD: Final = "not_told"
"""Outcome where the decode worker names none: it does not know tickets, or ignores them."""
_OUTCOMES: Final = frozenset(get_args(PrefillOutcome))


def ticket_key(config: GatewayConfig) -> bytes | None:
    """Return the key of tickets, or None if this gateway can have no pairs.

    Raises `ConfigError` if the secret cannot be read. The user's own is not insisted on where pairs could only come by
    registration; None then.
    """
    if not (config.prefill or config.transfer_secret_file or config.router_secret):
        return None
    try:
        return keys.ticket_key(config.transfer_secret_file)
    except ConfigError:
        if config.prefill or config.transfer_secret_file:
            raise
        return None


def ticket_headers(
    state: GatewayState, selection: Selection, headers: CIMultiDict[str], request_id: str
) -> CIMultiDict[str]:
    """Return the headers of a request; those to the decode worker of a pair send it to the prefill worker.

    `request_id` is the one that the worker will read in them.
    """
    if selection.kv_port is None or state.ticket_key is None:
        return headers
    host = URL(selection.prefill.url).raw_host or ""
    peer = f"[{host}]:{selection.kv_port}" if ":" in host else f"{host}:{selection.kv_port}"
    signed = CIMultiDict(headers)
    signed[TICKET_HEADER] = sign_ticket(state.ticket_key, request_id, peer)
    return signed


def outcome_of(headers: Mapping[str, str]) -> str:
    """Return what the prefill side of a pair did, from the headers of the decode worker's answer."""
    outcome = headers.get(OUTCOME_HEADER, "")
    return outcome if outcome in _OUTCOMES else _NOT_TOLD
