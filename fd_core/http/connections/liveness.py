"""GET /health on a port and a thread of its own: a busy event loop does not delay it, and one that is stuck shows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from fd_core.config import ListenConfig
from fd_core.http.access.control import AccessControl
from fd_core.http.connections.connections import last_answer
from fd_core.http.connections.listening import bind_socket, hangup_reloads, signals_stop
from fd_core.http.errors import HealthAnswer
from fd_core.http.supervision import Supervisor

log = logging.getLogger(__name__)

_BEAT_SECONDS: Final = 0.25
_STUCK_SECONDS: Final = 10.0
"""An event loop that has not beaten for so long is taken for stuck; no request may hold it for a tenth of a second."""
_CONNECTION_SECONDS: Final = 2.0
_MOST_CONNECTIONS: Final = 64
_MOST_BYTES: Final = 4096


@contextlib.contextmanager
def attended(
    config: ListenConfig,
    access: AccessControl,
    supervisor: Supervisor,
    *,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    dead: Callable[[], str],
) -> Iterator[None]:
    """Take signals for the block, read the keys again on SIGHUP, and serve the health port, see `liveness`."""
    reload = access.reload if access.reloadable else None
    with signals_stop(stop, hurry), hangup_reloads(reload, supervisor), liveness(config, dead):
        yield


@contextlib.contextmanager
def liveness(config: ListenConfig, dead: Callable[[], str]) -> Iterator[None]:
    """Serve /health on `config.health_port` for the block, if it is given; call this on the event loop that serves.

    `dead` returns why the server is dead, or nothing; it is called on another thread. Raises `ConfigError` if the port
    is taken.
    """
    if config.health_port is None:
        yield
        return
    with bind_socket(config.host, config.health_port, flag="--health-port") as sock:
        server = _Liveness(sock, dead)
        log.info("/health is served at port %d as well", sock.getsockname()[1])
        try:
            yield
        finally:
            server.close()


class _Liveness:
    """A thread with an event loop of its own, and a beat on the loop of the server."""

    def __init__(self, sock: socket.socket, dead: Callable[[], str]) -> None:
        sock.listen()  # at once, so that nobody is refused until the thread runs
        self._sock = sock
        self._dead = dead
        self._open = 0
        self._server_loop = asyncio.get_running_loop()
        self._beat()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fdcore-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no longer."""
        self._timer.cancel()
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_CONNECTION_SECONDS)

    def _beat(self) -> None:
        self._last = time.monotonic()
        self._timer = self._server_loop.call_later(_BEAT_SECONDS, self._beat)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._answer, sock=self._sock, limit=_MOST_BYTES):
            await self._ended.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, whatever its headers are, and close."""
        self._open += 1
        try:
            if self._open <= _MOST_CONNECTIONS:
                async with asyncio.timeout(_CONNECTION_SECONDS):
                    line = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0]
                    writer.write(self._response(line))
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # whoever asks so gets no answer
        finally:
            self._open -= 1
            writer.close()

    def _response(self, line: bytes) -> bytes:
        method, _, path = line.partition(b" ")
        if path.partition(b" ")[0].partition(b"?")[0] not in (b"/health", b"/ping") or method not in (b"GET", b"HEAD"):
            status, answer = 404, HealthAnswer("not found", "this port serves GET /health only")
        else:
            silent = time.monotonic() - self._last
            reason = self._dead() if silent < _STUCK_SECONDS else f"the event loop has been stuck for {silent:.0f} s"
            status, answer = 503 if reason else 200, HealthAnswer("dead" if reason else "ok", reason or None)
        body = msgspec.json.encode(answer)
        whole = last_answer(status, body)
        return whole.removesuffix(body) if method == b"HEAD" else whole
