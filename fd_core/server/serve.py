"""Socket, signals and drain: runs the application on uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from fd_core.config import ServerConfig
from fd_core.engine.client import EngineClient
from fd_core.errors import ConfigError, EngineDead
from fd_core.server.app import create_app
from fd_core.server.bounded_http import BoundedHttp
from fd_core.server.state import ServerState
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.tokenizer import Tokenizer

__all__ = ["bind_socket", "serve_http"]

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ABORT_SECONDS = 5
"""How long aborted answers may take to reach their clients once the drain is over."""


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind the listening socket; port 0 takes a free one. Call it before loading a model.

    Raises `ConfigError`, naming the flag, if the port is in use, not allowed or out of range, or the host unknown.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} does not exist; ports go from 0 to 65535", field="--port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"the host {host!r} cannot be resolved: {error.strerror}", field="--host") from error
    # A reusable address can be bound twice until somebody listens, so it is the second choice, needed only while
    # connections of an earlier server linger.
    for reuse in (0, 1):
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            sock.bind(address)
        except OSError as error:
            sock.close()
            if reuse or error.errno != errno.EADDRINUSE:
                raise _cannot_listen(host, port, error) from error
        else:
            break
    return sock


async def serve_http(
    config: ServerConfig,
    client: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    sock: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or `stop`; then drain and return. The client stays open: whoever opened it closes it.

    Drain: new generations are refused with 503 and /ready says so, running ones go on for `config.drain_seconds`,
    the rest is aborted and its clients get what there is. A second signal aborts at once. `sock` comes from
    `bind_socket`; without it the socket is bound here. `on_ready` is called with the URL once requests are taken.
    Raises `ConfigError` if the port is in use.
    """
    sock = sock or bind_socket(config.host, config.port)
    warn_if_open(config)
    app = create_app(config, client, tokenizer, template)
    state: ServerState = app.state.fd
    url = _url(config.host, sock)
    server = _Server(
        uvicorn.Config(
            app,
            loop="none",
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_ABORT_SECONDS,
        ),
        on_started=lambda: on_ready(url) if on_ready else None,
    )
    stop = stop or asyncio.Event()
    hurry = asyncio.Event()
    try:
        # Connections inherit this, so that those which linger do not keep a restarted server from its port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.listen()  # here, because an event loop may keep it to itself that somebody else listens already
        with _signals(stop, hurry):
            serving = asyncio.create_task(server.serve([sock]))
            drain = asyncio.create_task(_drain(state, config.drain_seconds, stop, hurry))
            try:
                await asyncio.wait((serving, drain), return_when=asyncio.FIRST_COMPLETED)
            finally:
                drain.cancel()
                server.should_exit = True
                await serving
    except OSError as error:
        raise _cannot_listen(config.host, sock.getsockname()[1], error) from error
    finally:
        sock.close()
        state.text_worker.shutdown(wait=False, cancel_futures=True)


def warn_if_open(config: ServerConfig) -> None:
    """Warn about a server that others can reach and that asks for no key."""
    if not config.api_keys and not _is_loopback(config.host):
        log.warning(
            "%s can be reached from other machines and no API key is set: whoever can reach it may use it; "
            "set --api-key or keep to --host 127.0.0.1",
            config.host or "every address",
        )


class _Server(uvicorn.Server):
    """uvicorn, with signals left to `serve_http` and a call once it listens."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would stop listening before the drain."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen and tell."""
        await super().startup(sockets=sockets)
        self._on_started()


async def _drain(state: ServerState, seconds: float, stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """Wait for `stop`, then until nothing runs, `seconds` have passed or `hurry` is set; abort what is left."""
    await stop.wait()
    state.draining = True
    log.info("shutting down: %d requests may go on for %g s", len(state.active), seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while len(state.active) and not hurry.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(hurry.wait(), 0.05)
    if len(state.active):
        log.warning("aborting %d requests that still run", len(state.active))
        with contextlib.suppress(EngineDead):
            state.client.abort_all()


@contextlib.contextmanager
def _signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """Set `stop` on the first signal and `hurry` on the next."""

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    installed = []
    try:
        for number in _SIGNALS:
            # only the main thread's loop can take signals; elsewhere the caller stops the server by `stop`
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, on_signal)
                installed.append(number)
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)


def _url(host: str, sock: socket.socket) -> str:
    port = sock.getsockname()[1]
    shown = {"": "localhost", "0.0.0.0": "localhost", "::": "localhost"}.get(host, host)  # noqa: S104  # for reading
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()}",
        field="--port",
        hint="stop what uses the port, or choose another with --port",
    )
