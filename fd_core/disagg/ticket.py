"""Ticket by which a router assigns the prompt of a request at a decode worker to a prefill worker.

A ticket is signed with a key derived from the secret that the workers share, so that clients cannot send a worker to an
address of their choice. It is valid for one request id.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

TICKET_HEADER: Final = "X-FD-Prefill"
"""Header of a request to a decode worker: the ticket."""
OUTCOME_HEADER: Final = "X-FD-Prefill-Outcome"
"""Header of a decode worker's response: one of `fd_core.effects.operations.Outcome`."""
KV_PORT_HEADER: Final = "X-FD-KV-Port"
"""Header of a prefill worker's response to a health check: the port of its transfers, at the host of its API."""
ROLE_HEADER: Final = "X-FD-Role"
"""Header of any worker's response to a health check: mixed, prefill or decode."""

_PEER: Final = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,64}\]):[0-9]{1,5}")


def sign_ticket(key: bytes, request_id: str, peer: str) -> str:
    """Return the ticket that sends the request to `peer`, `host:port` of a prefill worker's transfers."""
    return f"{peer};{_mac(key, request_id, peer)}"


def read_ticket(key: bytes, request_id: str, ticket: str) -> str | None:
    """Return the peer of a ticket, None unless it was signed with `key` for this request and can be an address."""
    peer, separator, mac = ticket.partition(";")
    if len(ticket) > 512 or not separator or not _PEER.fullmatch(peer):
        return None
    genuine = hmac.compare_digest(mac.encode("utf-8", "replace"), _mac(key, request_id, peer).encode())
    return peer if genuine and 1 <= int(peer.rpartition(":")[2]) <= 65535 else None


def _mac(key: bytes, request_id: str, peer: str) -> str:
    """Return the MAC of both texts; the length marks the end of the first. Lone surrogates are encoded, too."""
    name, place = (text.encode("utf-8", "surrogatepass") for text in (request_id, peer))
    return hmac.new(key, len(name).to_bytes(8, "little") + name + place, hashlib.sha256).hexdigest()
