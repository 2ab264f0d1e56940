"""Socket, signals, drain and registration: runs the application on uvicorn, over HTTP/1.1 with a limit on heads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import aiohttp
import httptools
import uvicorn
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from yarl import URL

from fd_core.config import ServerConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.errors import ConfigError, EngineDead
from fd_core.http.connections import listening
from fd_core.http.connections.connections import (
    MAX_HEAD_BYTES,
    Connections,
    Listener,
    WatchedProtocol,
    attended,
    connection_limit,
)
from fd_core.http.connections.tls import ServingTls, client_context
from fd_core.http.spans import RequestSpans
from fd_core.http.supervision import Supervisor, cancelled
from fd_core.models.families.image_processor import ImageProcessor
from fd_core.server.app import create_app
from fd_core.server.state import ServerState
from fd_core.server.stream.generation import prefill_span
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.parsing.answer import Parsers
from fd_core.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_ABORT_SECONDS = 5
"""Timeout for sending aborted answers to their clients once the drain has ended, in seconds."""
_SLICE: Final = 4096
"""Bytes that are parsed at a time while a head is not complete."""
_EACH_TIME: Final = ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket library")
"""Warnings of uvicorn that any client can cause, at any rate."""
_REREGISTER_SECONDS: Final = 10.0
"""Seconds between registrations; a repeated one changes nothing, but registers this server at a restarted router."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=3)
_SILENT: Final = "no response"
_ABSENT: Final = frozenset({_SILENT, aiohttp.ClientConnectorError.__name__})
"""Errors that mean that there is no router at an address."""


async def serve_http(
    config: ServerConfig,
    client: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    ticket_key: bytes | None = None,
    parsers: Parsers | None = None,
    spans: RequestSpans | None = None,
    images: ImageProcessor | None = None,
    sock: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or `stop`; then drain and return. The client and `spans` stay open.

    Drain: /ready reports the shutdown at once, after `config.drain_delay` new requests are rejected with 503, running
    ones continue for `config.drain_seconds`, the rest is aborted and its clients get the partial text. A second signal
    aborts at once. Raises `ConfigError` for port, certificate or a registration that cannot work.
    """
    tls = ServingTls.of(config)
    sock = sock or listening.bind_socket(config.host, config.port)
    connections = Connections(config, connection_limit(config))
    app = create_app(config, client, tokenizer, template, ticket_key, parsers, spans, connections.stats, images)
    state: ServerState = app.state.fd
    listening.warn_if_open(config.host, keys=state.access.has_keys)
    if spans is not None:
        client.listen_for_prefills(partial(prefill_span, spans, client.info.model))
    url = listening.url_of(config.host, sock, secure=tls is not None)
    registration = registration_of(config, url, lambda: state.incarnation, role=client.info.role)

    def started() -> None:
        state.grammars.warm_up()
        state.supervisor.start("history", partial(state.history.run, state.figures))
        if registration is not None:
            registration.start(state.supervisor)
        if state.batches is not None:
            state.batches.resume()
        if on_ready is not None:
            on_ready(url)

    server = _Server(
        uvicorn.Config(
            app,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # clients could forge the address in the access log
            timeout_keep_alive=math.ceil(config.timeout_keep_alive),
            timeout_graceful_shutdown=_ABORT_SECONDS,
        ),
        connections,
        tls,
        on_started=started,
    )
    stop = stop or asyncio.Event()
    hurry = asyncio.Event()
    try:
        with (
            listening.port_errors(config.host, sock),
            attended(
                config,
                state.access,
                state.supervisor,
                stop=stop,
                hurry=hurry,
                dead=lambda: "" if client.healthy else client.missing,
            ),
        ):
            serving = asyncio.create_task(server.serve([sock]))
            drain = asyncio.create_task(_drain(state, server, registration, stop=stop, hurry=hurry))
            try:
                await asyncio.wait((serving, drain), return_when=asyncio.FIRST_COMPLETED)
            finally:
                drain.cancel()
                if registration is not None:
                    await registration.deregister()
                if state.batches is not None:
                    await state.batches.close()
                if client.kv_log is not None:
                    client.kv_log.close()
                server.should_exit = True
                await serving
                await state.supervisor.close()
            if drain.done() and not drain.cancelled():
                drain.result()
    finally:
        sock.close()
        state.prompt_reader.close()
        state.grammars.close()


class _Server(uvicorn.Server):
    """uvicorn, with signals left to `serve_http`, connections to `Listener`, and a call once it listens."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, tls: ServingTls | None, on_started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._tls = tls
        self._on_started = on_started
        self.servers: list[Any] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would stop listening before the drain."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        protocol = partial(
            _BoundedHttp,
            self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        await self.lifespan.startup()
        for sock in sockets or ():
            self.servers.append(Listener(sock, protocol, self._connections, tls=self._tls))
        self.started = True
        self._on_started()

    def close_connections_after_answers(self) -> None:
        """Close connections after the answers that have begun."""
        for connection in self.server_state.connections:
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                cycle.keep_alive = False


async def _drain(
    state: ServerState, server: _Server, registration: Registration | None, stop: asyncio.Event, hurry: asyncio.Event
) -> None:
    """Wait for `stop`, announce the drain, reject requests, and wait until idle or timed out; then abort the rest."""

    def prefills_for_others() -> bool:
        leases = state.client.stats.leases
        return state.client.info.role == "prefill" and state.client.alive and leases is not None and leases.open > 0

    await stop.wait()
    state.drain.leaving = True
    server.close_connections_after_answers()
    if state.batches is not None:
        await state.batches.close()
    if registration is not None:
        await registration.deregister()
    await state.drain.refuse_after(state.config.drain_delay, hurry)
    # While it is paused or asleep nothing would end, and a resume would be rejected.
    seconds = 0.0 if state.client.info.stopped else state.config.drain_seconds
    await state.drain.wait(seconds, hurry, prefills_for_others)
    if len(state.active):
        log.warning("aborting %d requests that still run", len(state.active))
        with contextlib.suppress(EngineDead):
            state.client.abort_all()


def _should_log(record: logging.LogRecord) -> bool:
    """Return False for log records that clients cause, and for requests that a shutdown cancels."""
    cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cancelled and not str(record.msg).startswith(_EACH_TIME)


logging.getLogger("uvicorn.error").addFilter(_should_log)


class _BoundedHttp(WatchedProtocol, HttpToolsProtocol):
    """uvicorn's protocol, which answers 431 and closes when a head does not end."""

    def __init__(self, connections: Connections, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.watch = connections
        self._in_head = True
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse, and count bytes until the head is complete, in slices so that a large read is counted too."""
        data, begin = self.without_upgrade(data), 0
        while begin < len(data) and not self.transport.is_closing():
            part = data[begin : begin + _SLICE] if self._in_head else data[begin:]
            begin += len(part)
            super().data_received(part)
            if not self._in_head:
                continue
            self._head_bytes += len(part)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.end(self.head_too_large())

    def send_400_response(self, msg: str) -> None:
        """Respond to input that is not HTTP, in the format of every other error."""
        self.end(self.not_http())

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop counting: the body has a separate limit."""
        self._in_head = False
        if not self.url.startswith(b"/"):
            self._take_host_of_target()
        self.head_complete()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.body_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.answer_complete()

    def _take_host_of_target(self) -> None:
        """Use the host of an absolute request URL, which overrides the Host header (RFC 9112, section 3.2.2)."""
        try:
            host = httptools.parse_url(self.url).host
        except httptools.HttpParserInvalidURLError:
            return
        if host is not None:
            host = b"[%b]" % host if b":" in host else host
            self.headers[:] = [(name, value) for name, value in self.headers if name != b"host"]
            self.headers.append((b"host", host))


class Registration:
    """Keeps one server registered at each address of its routers' names; router failures do not affect the server."""

    def __init__(self, config: ServerConfig, url: str, instance: Callable[[], str], role: str) -> None:
        """See `registration_of`. Raises `ConfigError` for certificates that cannot be read."""
        self._trusted = client_context(config.router_ca_certs, "--router-ca-certs", config)
        self._router = (config.router or "").rstrip("/")
        self._secret = config.router_secret
        self._url = config.advertise_url or url
        self._role = role
        self._instance = instance
        self._task: asyncio.Task[None] | None = None
        self._last_errors: dict[str, str] = {}
        """Failures that were logged and are not resolved, by address."""

    def start(self, supervisor: Supervisor | None = None) -> None:
        """Begin; returns at once."""
        self._task = (supervisor or Supervisor()).start("registration", self._keep_registered)

    async def deregister(self) -> None:
        """Deregister; call before requests are rejected. Idempotent, also without a start."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancelled(task)
        await self._post("deregister")

    async def _keep_registered(self) -> None:
        while True:
            answered = await self._post("register")
            await asyncio.sleep(_REREGISTER_SECONDS if answered else 1.0)

    async def _post(self, what: str) -> bool:
        """Post to each router; return True if one accepted. An absent one is not an error if another responds."""
        target = URL(self._router)
        try:
            found = await ThreadedResolver().resolve(target.host or "", target.port or 0, socket.AF_UNSPEC)
        except (OSError, ValueError) as error:
            error_texts = {self._router: type(error).__name__}
        else:
            errors = await asyncio.gather(*(self._notify_router(what, each) for each in found))
            error_texts = {
                self._router if each["host"] == target.host else f"{self._router} ({each['host']})": error_text
                for each, error_text in zip(found, errors, strict=True)
                if error_text not in _ABSENT or "" not in errors
            }
        previous_errors, self._last_errors = (
            self._last_errors,
            {address: error_text for address, error_text in error_texts.items() if error_text},
        )
        for address, error_text in error_texts.items():
            if error_text and error_text != previous_errors.get(address):
                log.warning("the router at %s did not %s this server: %s", address, what, error_text)
            elif not error_text and address in previous_errors:
                log.info("the router at %s responds again", address)
        return "" in error_texts.values()

    async def _notify_router(self, what: str, address: ResolveResult) -> str:
        """Send one message to the router at one address; return the reason of a failure, empty on success."""
        body = {"url": self._url, "role": self._role, "instance": self._instance()}
        connector = aiohttp.TCPConnector(resolver=_PinnedResolver(address), ssl=self._trusted)
        headers = {"Authorization": f"Bearer {self._secret}"}
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, headers=headers) as session,
                session.post(f"{self._router}/{what}", json=body, allow_redirects=False) as answer,
            ):
                return "" if answer.status == 200 else f"HTTP status {answer.status}"
        except TimeoutError:
            return _SILENT
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return type(error).__name__


class _PinnedResolver(AbstractResolver):
    """Resolves every name to one address, so that the name in the request and in its certificate stays the same."""

    def __init__(self, address: ResolveResult) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [self._address]

    async def close(self) -> None:
        """Nothing to close."""


def registration_of(
    config: ServerConfig, url: str, instance: Callable[[], str], role: str = "mixed"
) -> Registration | None:
    """Return the configured registration, or None; `instance` is called each time. Raises `ConfigError`."""
    if config.router is None:
        return None
    if config.advertise_url is None and config.host in listening.ANY_ADDRESS:
        message = "the server listens on all addresses, so its URL for the router is unknown"
        raise ConfigError(message, field="--advertise-url", hint="set it, for example to http://10.0.0.5:8000")
    return Registration(config, url, instance, role=role)
