"""Who computes the prompt of a request: a router says so to a decode worker, in a signed header."""

from __future__ import annotations

from fastapi import Request

from fd_core.disagg.ticket import TICKET_HEADER, read_ticket
from fd_core.server.errors import ApiError
from fd_core.server.state import ServerState

__all__ = ["prefill_peer"]


def prefill_peer(state: ServerState, request: Request) -> str:
    """Return `host:port` of the prefill worker that computes the prompt, empty if this one does.

    Raises `ApiError` for a ticket that was not signed with this worker's secret, or that it has no use for.
    """
    ticket = request.headers.get(TICKET_HEADER)
    if ticket is None:
        return ""
    if state.client.info.role != "decode" or state.ticket_key is None:
        raise ApiError(
            400,
            f"{TICKET_HEADER} names a prefill worker, but this worker was not started with --role decode",
            code="not_a_decode_worker",
        )
    peer = read_ticket(state.ticket_key, request.state.request_id, ticket)
    if peer is None:
        raise ApiError(
            403,
            f"{TICKET_HEADER} is not signed with this worker's secret: routers, prefill and decode workers need the "
            "same one (--transfer-secret-file)",
            code="bad_ticket",
        )
    return peer
