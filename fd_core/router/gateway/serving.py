"""Sockets, signals and drain of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from fd_core.errors import FdError
from fd_core.http.access.control import AccessControl
from fd_core.http.bodies import BodyBudget
from fd_core.http.connections import listening
from fd_core.http.connections.connections import Connections, attended, connection_limit
from fd_core.http.connections.tls import ServingTls, client_context
from fd_core.http.spans import RequestSpans
from fd_core.http.supervision import Supervisor
from fd_core.router.config import GatewayConfig
from fd_core.router.gateway.gate import Admin, RouterGate
from fd_core.router.gateway.http1.clients import GatewayHttp
from fd_core.router.gateway.http1.workers import WorkerClient
from fd_core.router.gateway.requests.route_requests import CostReader, RouteRequestReader
from fd_core.router.gateway.requests.state import GatewayMetrics, GatewayState
from fd_core.router.gateway.workers.health_checks import HealthChecks, KVFollowers, first_root
from fd_core.router.router import Router
from fd_core.text.prompt_reader import ModelText, find_text

log = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 0.5
"""Grace period for answers in transit to clients at the end of the drain."""
_LEARN_SECONDS: Final = 1.0
"""Seconds between two queries for the model that the workers serve."""
_ADMIN_CONNECTIONS: Final = 256
"""Most connections on the admin port, which workers use only briefly."""


async def serve_gateway(
    config: GatewayConfig,
    router: Router,
    text: ModelText | None,
    *,
    learns: bool,
    ticket_key: bytes | None = None,
    spans: RequestSpans | None = None,
    sock: socket.socket,
    admin_sock: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or `stop`; then drain. Raises `ConfigError` for a port or certificate.

    `text` is how the workers read text; if it is None and `learns`, a worker is queried for its model, whose tokenizer
    is loaded if it is on this machine. `ticket_key` is needed for pairs. `spans` are closed by the caller.
    """
    tls = ServingTls.of(config)
    trusted = client_context(config.worker_ca_certs, "--worker-ca-certs", config)
    stop, hurry = stop or asyncio.Event(), asyncio.Event()
    access = AccessControl(config)
    listening.warn_if_open(config.host, keys=access.has_keys)
    async with contextlib.AsyncExitStack() as stack:
        client = WorkerClient(trusted, connect_seconds=config.connect_seconds, read_seconds=config.read_seconds)
        stack.callback(client.close)
        connections = Connections(config, connection_limit(config, descriptors=2))
        bodies, supervisor = BodyBudget(config.max_body_memory), Supervisor()
        stats = (connections.stats, bodies.stats, supervisor.stats)
        state = GatewayState(
            config,
            router,
            client,
            reader=RouteRequestReader(text),
            ticket_key=ticket_key,
            metrics=GatewayMetrics(router, refusals=access.refusals, stats=stats),
            bodies=bodies,
            access=access,
            costs=CostReader(text),
            supervisor=supervisor,
            spans=spans,
        )
        stack.callback(lambda: state.reader.close())
        stack.callback(lambda: state.costs.close())
        followers = KVFollowers(state)
        checks = HealthChecks(state, followers.offered)
        if admin_sock is not None:
            few = Connections(config, _ADMIN_CONNECTIONS)
            with listening.port_errors(config.admin_host, admin_sock, "--admin-port"):
                admin = GatewayHttp(Admin(state, checks.wake), admin_sock, few, tls)
            stack.push_async_callback(admin.close, _CLOSE_SECONDS)
        with listening.port_errors(config.host, sock):
            gateway = GatewayHttp(RouterGate(state), sock, connections, tls)
        stack.push_async_callback(gateway.close, _CLOSE_SECONDS)
        state.supervisor.start("health_checks", checks.run)
        if learns and text is None:
            state.supervisor.start("learn_model", partial(_learn, state))
        stack.push_async_callback(state.supervisor.close)
        with attended(config, access, supervisor, stop=stop, hurry=hurry, dead=lambda: ""):
            if on_ready is not None:
                on_ready(listening.url_of(config.host, sock, secure=tls is not None))
            await stop.wait()
            await state.drain.refuse_after(config.drain_delay, hurry)
            await state.drain.wait(config.drain_seconds, hurry)


async def _learn(state: GatewayState) -> None:
    """Query workers until one reports its model; use that model's tokenizer if it is on this machine."""
    while (name := await first_root(state)) is None:
        await asyncio.sleep(_LEARN_SECONDS)
    try:
        text = await asyncio.to_thread(find_text, name, offline=True)
    except FdError:
        log.warning(
            "the tokenizer of %s is not on this machine, so prompts are compared by their bytes; "
            "set --tokenizer MODEL to compare tokens",
            "".join(letter if letter.isprintable() else "?" for letter in name[:128]),
        )
        return
    state.reader.close()
    state.costs.close()
    state.reader, state.costs = RouteRequestReader(text), CostReader(text, state.costs.context)
    log.info("prompts are compared by the tokens of %s", text.name)
