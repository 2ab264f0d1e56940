"""Pairs of a prefill and a decode worker: the ticket that names the prefill worker, and the outcome of its prefill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

from multidict import CIMultiDict
from yarl import URL

from fd_core.disagg import keys
from fd_core.disagg.ticket import OUTCOME_HEADER, TICKET_HEADER, sign_ticket
from fd_core.errors import ConfigError
from fd_core.router.config import GatewayConfig
from fd_core.router.gateway.requests.state import GatewayState
from fd_core.router.selection import Selection
from fd_core.types import PrefillOutcome

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
