"""The connections of a prefill worker to decode workers: one socket that listens, on the one thread that owns it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from fd_core.disagg.messages import FromDecode, FromPrefill
from fd_core.disagg.stats import SideStats
from fd_core.disagg.wire import AuthenticationError, InvalidMessage, Wire
from fd_core.effects.sockets import Context, open_socket, tcp_endpoint
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.errors import ConfigError
from fd_core.kv.stores.contract import Bytes

_LINGER_MS: Final = 200
"""Time to send pending messages at close, in milliseconds."""


class DecodeConnections:
    """A ROUTER for all decode workers. A route is the ROUTER's id of the connection on which a message arrived.

    Everything here belongs to the thread of the loop. Messages may be lost, repeated and reordered.
    """

    def __init__(
        self,
        loop: ThreadLoop,
        wire: Wire,
        stats: SideStats,
        host: str,
        port: int,
        *,
        on_message: Callable[[bytes, FromDecode], object],
        on_reject: Callable[[bytes, str, str], object],
    ) -> None:
        """Listen at `host:port`, 0 for any free port. Raises `ConfigError` if that is not possible.

        `on_message` receives the route and each message. `on_reject` receives route, lease and reason of an
        authenticated message over a limit; unauthenticated messages are dropped.
        """
        self._loop = loop
        self._on_message = on_message
        self._on_reject = on_reject
        self._wire = wire
        self._stats = stats
        try:
            address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{host} is not an address of this machine", field="--transfer-host") from error
        self._context: Context = zmq.Context(1)
        self._socket = open_socket(self._context, zmq.ROUTER)  # windows bound the pieces of a lease in flight
        endpoint, self._socket.ipv6 = tcp_endpoint(str(address), port or "*")
        try:
            self._socket.router_mandatory = True  # a send to a disconnected decode worker fails
            self._socket.maxmsgsize = wire.max_request_frame
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._close()
            foreign = error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)
            raise ConfigError(
                f"cannot listen for transfers at {host}:{port}: {error.strerror}",
                field="--transfer-host" if foreign else "--transfer-port",
                hint="use an address of this machine" if foreign else "0 selects a free port",
            ) from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        loop.watch(self._socket, self._handle)

    def send(self, route: bytes, message: FromPrefill, frames: Sequence[Bytes] = ()) -> bool:
        """Send a message and frames after it, which are not copied; return True if it was sent."""
        sealed = self._wire.seal_from_prefill(message)
        try:
            self._socket.send_multipart([route, sealed, *frames], zmq.NOBLOCK, copy=not frames)
        except zmq.ZMQError:  # disconnected
            return False
        return True

    def close(self) -> None:
        """Stop listening; pending messages may still be sent."""
        self._loop.forget(self._socket)
        self._close()

    def _close(self) -> None:
        self._socket.close(linger=_LINGER_MS)
        self._context.term()

    def _handle(self, frames: list[zmq.Frame]) -> None:
        route = frames[0].bytes
        try:
            if len(frames) != 2:
                raise AuthenticationError("a message is one frame")
            message = self._wire.open_from_decode(frames[1].buffer)
        except AuthenticationError:
            self._stats.dropped_frames += 1
        except InvalidMessage as invalid:
            self._stats.dropped_frames += 1
            if invalid.lease is not None:
                self._on_reject(route, invalid.lease, invalid.reason)
        else:
            self._on_message(route, message)
