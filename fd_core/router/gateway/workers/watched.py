"""The gateway's HTTP server on connections with timeouts and limits."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from yarl import URL

from fd_core.config import ListenConfig
from fd_core.http.connections.connections import MAX_HEAD_BYTES, Connections, Listener, WatchedProtocol
from fd_core.http.connections.tls import ServingTls
from fd_core.http.hosts import Visit
from fd_core.router.gateway.requests.forwarding import error_response

_QUIET: Final = logging.Logger("fd_core.router.gateway.http", logging.CRITICAL + 1)
"""For the HTTP library, which would log input that it cannot parse, keys and prompts included."""


class GatewayHttp:
    """Serves a bound socket. A client that leaves cancels the handler of its request."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        sock: socket.socket,
        config: ListenConfig,
        connections: Connections,
        tls: ServingTls | None,
    ) -> None:
        """Begin to listen; raises `OSError` if the address is in use."""
        loop = asyncio.get_running_loop()
        bounded = partial(_bounded, handler)
        self._server = web.Server(bounded, request_factory=_make_request, handler_cancellation=True)

        def protocol() -> _WatchedHandler:
            return _WatchedHandler(
                self._server,
                loop=loop,
                access_log=None,
                logger=_QUIET,
                auto_decompress=False,
                keepalive_timeout=config.timeout_keep_alive,
                lingering_time=2.0,
                max_line_size=MAX_HEAD_BYTES,
                max_field_size=MAX_HEAD_BYTES,
                watch=connections,
            )

        self._listener = Listener(sock, protocol, connections, tls=tls)

    async def close(self, seconds: float) -> None:
        """Stop listening, with a grace period for answers in transit."""
        self._listener.close()
        await asyncio.sleep(0)  # start requests that have arrived before idle connections are closed
        self._server.pre_shutdown()
        await self._server.shutdown(seconds)
        await self._listener.wait_closed()


class _WatchedHandler(WatchedProtocol, web.RequestHandler):
    def __init__(self, *arguments: Any, watch: Connections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.watch = watch
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Count what arrived while a head is not complete: the library bounds each line only."""
        if self._waits_for != "body" and not self._messages:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._messages:
            self._head_bytes = 0
        elif self._head_bytes > MAX_HEAD_BYTES and not self._transport.is_closing():
            self.end(self.head_too_large())

    async def finish_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().finish_response(*arguments, **options)
        finally:
            self.answer_complete()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Respond to unreadable input in the format of every other error."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        error = self.head_too_large() if isinstance(exc, LineTooLong) else self.not_http()
        answer = error_response(error, request.path)
        answer.force_close()
        return answer


async def _bounded(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], request: web.BaseRequest
) -> web.StreamResponse:
    """Answer a request if its head can be read, and is not larger than those that arrive in pieces may be."""
    head = len(request.raw_path) + sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    readable = cast("_Request", request).readable
    if head <= MAX_HEAD_BYTES and readable:
        return await handler(request)
    protocol = cast("_WatchedHandler", request.protocol)
    answer = error_response(protocol.head_too_large() if readable else protocol.not_http(), request.path)
    answer.force_close()
    return answer


class _Request(web.BaseRequest):
    readable = True

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Omit the Server header, which is useful only to attackers."""
        response.headers.popall("Server", None)


def _make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    protocol.head_complete()
    payload.on_eof(protocol.body_complete)
    loop = asyncio.get_running_loop()
    try:
        return _Request(message, payload, protocol, writer, task, loop)
    except ValueError:  # invalid host in an absolute URL; raised here, the client would get no response
        request = _Request(message._replace(url=URL("/")), payload, protocol, writer, task, loop)
        request.readable = False
        return request


def visit_of(request: web.BaseRequest) -> Visit:
    """Return the host and the origin of a request."""
    hosts = request.headers.getall("Host", [])
    if "://" in request.raw_path.partition("?")[0]:
        hosts = [request.url.authority]  # an absolute URL overrides the Host header (RFC 9112, section 3.2.2)
    address = request.protocol.sockname
    return Visit.of(request.method, hosts, address[0] if isinstance(address, tuple) else None, request.headers.get)
