"""Where a prefill worker listens to decode workers, and how it answers them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from fd_core.disagg.messages import FromDecode, FromPrefill
from fd_core.disagg.stats import Tally
from fd_core.disagg.wire import Unfit, Unsealed, Wire
from fd_core.errors import ConfigError
from fd_core.kv.stores.contract import Bytes

__all__ = ["Listener"]

_BATCH: Final = 64
"""Messages in one go, so that blocks are copied in between."""
_LINGER_MS: Final = 200
"""For what was said last."""


class Listener:
    """A ROUTER. A route is how it calls the connection that a message came on."""

    def __init__(self, wire: Wire, tally: Tally, host: str, port: int) -> None:
        """Listen at `host:port`, 0 for a free one. Raises `ConfigError` if that cannot be had."""
        self._wire = wire
        self._tally = tally
        try:
            family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{host} is no address of this machine", field="--transfer-host") from error
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        six = family == socket.AF_INET6
        try:
            self.socket.ipv6 = six
            self.socket.linger = 0
            self.socket.router_mandatory = True  # a decode worker that is gone shows when it is spoken to
            self.socket.sndhwm = 0  # windows bound what a lease may have on its way
            self.socket.maxmsgsize = wire.max_request_frame
            self.socket.bind(f"tcp://[{address[0]}]:{port or '*'}" if six else f"tcp://{address[0]}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            foreign = error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)
            raise ConfigError(
                f"cannot listen for transfers at {host}:{port}: {error.strerror}",
                field="--transfer-host" if foreign else "--transfer-port",
                hint="name an address of this machine" if foreign else "0 takes a free port",
            ) from error
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def read(self, hear: Callable[[bytes, FromDecode], object], turn_down: Callable[[bytes, str, str], object]) -> None:
        """Take in messages that arrived, at most a batch of them.

        `hear` takes route and message, `turn_down` route, lease and reason where a message is sealed but unfit. Whoever
        cannot seal is not answered.
        """
        for _ in range(_BATCH):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            route = frames[0].bytes
            try:
                if len(frames) != 2:
                    raise Unsealed("a message is one frame")
                message = self._wire.open_from_decode(frames[1].buffer)
            except Unsealed:
                self._tally.add("dropped_frames")
            except Unfit as unfit:
                self._tally.add("dropped_frames")
                if unfit.lease is not None:
                    turn_down(route, unfit.lease, unfit.reason)
            else:
                hear(route, message)

    def say(self, route: bytes, message: FromPrefill, frames: Sequence[Bytes] = ()) -> bool:
        """Send a message and frames behind it, which are not copied; return whether it left."""
        try:
            sealed = self._wire.seal_from_prefill(message)
            self.socket.send_multipart([route, sealed, *frames], zmq.NOBLOCK, copy=not frames)
        except (zmq.ZMQError, Unfit):  # the connection is gone, or the engine said what no message can hold
            return False
        return True

    def close(self) -> None:
        """Give the address up; what was said last may still leave."""
        self.socket.close(linger=_LINGER_MS)
        self._context.term()
