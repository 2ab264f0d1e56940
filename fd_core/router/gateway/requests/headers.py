"""Headers that the gateway passes on, to workers and to clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from fd_core.disagg.ticket import OUTCOME_HEADER, TICKET_HEADER
from fd_core.http.access.record import RequestRecord
from fd_core.http.access.tenants import TENANT_HEADER, Tenant, sign_tenant
from fd_core.http.access.usage import USAGE_HEADER
from fd_core.http.draining import DRAINING_HEADER
from fd_core.router.gateway.state import GatewayState

__all__ = ["AUTO_HEADERS", "to_client", "to_worker"]

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
