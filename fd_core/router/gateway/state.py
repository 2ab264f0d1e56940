"""What the parts of one gateway share."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field

import aiohttp

from fd_core.http.access.control import AccessControl
from fd_core.http.bodies import BodyBudget
from fd_core.http.draining import Drain
from fd_core.http.spans import RequestSpans
from fd_core.http.supervision import Supervisor
from fd_core.router.gateway.config import GatewayConfig
from fd_core.router.gateway.metrics import GatewayMetrics
from fd_core.router.gateway.requests.request_cost import CostReader
from fd_core.router.gateway.requests.route_requests import RouteRequestReader
from fd_core.router.gateway.requests.timeouts import WorkerTimeouts
from fd_core.router.router import Router
from fd_core.router.selection import Mode

__all__ = ["GatewayState", "PairingLog"]

log = logging.getLogger(__name__)


class PairingLog:
    """Says in the log when decode workers begin to compute prompts themselves, and when pairs are back."""

    def __init__(self) -> None:
        self._alone = False

    def saw(self, mode: Mode) -> None:
        """An attempt was made in this mode."""
        if mode == "mixed" or (mode == "alone") is self._alone:
            return
        self._alone = mode == "alone"
        if self._alone:
            log.warning("no prefill worker can be chosen: decode workers compute prompts themselves until one can")
        else:
            log.info("a prefill worker can be chosen again: prompts are computed by pairs")


@dataclass(slots=True)
class GatewayState:
    """Everything that an answer may depend on."""

    config: GatewayConfig
    router: Router
    session: aiohttp.ClientSession
    """For requests to workers."""
    reader: RouteRequestReader
    """Reads the prompts of requests; replaced when the workers' tokenizer becomes known."""
    ticket_key: bytes | None
    """Key of the tickets for pairs. Without one every prompt is computed by the decode worker."""
    metrics: GatewayMetrics
    access: AccessControl = field(default_factory=AccessControl)
    """The router's API keys and what they may take."""
    costs: CostReader = field(default_factory=lambda: CostReader(None))
    """Counts what requests of keys with a limit of tokens may take; replaced together with `reader`."""
    timeouts: WorkerTimeouts = field(default_factory=WorkerTimeouts)
    pairing: PairingLog = field(default_factory=PairingLog)
    supervisor: Supervisor = field(default_factory=Supervisor)
    """Runs the background tasks."""
    drain: Drain = field(default_factory=Drain)
    spans: RequestSpans | None = None
    """Makes the spans of requests; None makes none."""
    worker_secret: bytes = field(init=False)
    """Signs the tenants of requests: the digest of the workers' key, as they keep it."""
    bodies: BodyBudget = field(init=False)
    """Memory for bodies, until a worker has answered and no other one needs them."""

    def __post_init__(self) -> None:
        key = next(iter(self.config.worker_api_keys), "")
        self.worker_secret = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        self.bodies = BodyBudget(self.config.max_body_memory)

    @property
    def own_headers(self) -> dict[str, str]:
        """Headers of requests to workers that the gateway itself makes."""
        keys = self.config.worker_api_keys
        return {"Authorization": f"Bearer {keys[0]}"} if keys else {}
