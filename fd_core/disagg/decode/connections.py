"""The connections of a decode worker to prefill workers, on the one thread that owns them."""

from __future__ import annotations

import ipaddress
import math
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from fd_core.disagg.messages import FromDecode, FromPrefill
from fd_core.disagg.stats import SideStats
from fd_core.disagg.wire import AuthenticationError, InvalidMessage, Wire
from fd_core.effects.sockets import Context, Endpoint, Socket, open_socket, tcp_endpoint
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.kv.stores.contract import Bytes

_KEEP_SECONDS: Final = 30.0
"""Idle timeout of a connection without a lease."""
_LINGER_MS: Final = 200
"""Time to send pending messages at close, in milliseconds."""
_CONNECT_MS: Final = 3000
_MAX_FRAMES: Final = 16
_MAX_PORT: Final = 65535
_LOSSES: Final = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS: Final = _LOSSES | zmq.EVENT_HANDSHAKE_SUCCEEDED


def split_address(address: str) -> tuple[str, int]:
    """Return host, without brackets, and port of `host:port`. Raises `ValueError` if it is malformed."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
        raise ValueError("expected host:port")
    return host, int(port)


def look_up(host: str, port: int, found: Callable[[list[Endpoint]], object]) -> list[Endpoint]:
    """Return the endpoint of a numeric address; for a name return none and call `found` after the DNS lookup."""
    try:
        return [tcp_endpoint(str(ipaddress.ip_address(host)), port)]
    except ValueError:
        pass

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            infos = []
        found(list(dict.fromkeys(tcp_endpoint(str(info[4][0]), port) for info in infos)))

    threading.Thread(target=ask, name="fdcore-kv-names", daemon=True).start()
    return []


class PrefillLink(ABC):
    """Link of a decode worker to one prefill worker. A lost link is never reused."""

    def __init__(self) -> None:
        self.leases: set[str] = set()
        self.idle_since = 0.0
        """Time at which the last lease ended."""

    @abstractmethod
    def send(self, message: FromDecode) -> None:
        """Send a message; it may be lost."""


class Peer(PrefillLink):
    """One prefill worker: a DEALER and its monitor."""

    def __init__(self, address: str, wire: Wire) -> None:
        super().__init__()
        self.address = address
        self._wire = wire
        self.endpoints: list[Endpoint] = []
        """Endpoints not tried yet."""
        self.socket: Socket | None = None
        self.monitor: Socket | None = None
        self._connected = False

    def send(self, message: FromDecode) -> None:
        """Send a message; queued until there is a connection, lost if the endpoint is not known yet."""
        frame = self._wire.seal_from_decode(message)
        if self.socket is not None:
            self.socket.send(frame, zmq.NOBLOCK)

    def connect(self, context: Context) -> bool:
        """Start connecting to the next endpoint; return False if none is left. Messages sent before are lost."""
        self.close()
        while self.endpoints and not self._connected:
            endpoint, six = self.endpoints.pop(0)
            dealer = open_socket(context, zmq.DEALER)  # leases are bounded, and so are their messages
            dealer.ipv6 = six
            dealer.maxmsgsize = self._wire.max_frame
            dealer.connect_timeout = _CONNECT_MS
            self.socket, self.monitor = dealer, dealer.get_monitor_socket(_EVENTS)
            try:
                dealer.connect(endpoint)
                return True
            except zmq.ZMQError:
                self.close()
        return False

    def loss(self, event: int) -> str | None:
        """Record an event of the connection; return the reason why it was lost, None if it was not."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
            return None
        broke = "the connection to the prefill worker was lost"
        return broke if self._connected else "the prefill worker cannot be reached"

    def close(self) -> None:
        """Close the sockets; pending messages may still be sent."""
        if self.socket is not None and self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=_LINGER_MS)
        self.socket = self.monitor = None


class PrefillConnections:
    """Links to prefill workers by address: one connection for all leases there, closed after an idle timeout.

    Everything here belongs to the thread of the loop. Messages may be lost, repeated and reordered.
    """

    def __init__(
        self,
        loop: ThreadLoop,
        wire: Wire,
        stats: SideStats,
        *,
        on_message: Callable[[PrefillLink, FromPrefill, Sequence[Bytes]], None],
        reopen: Callable[[str], None],
        on_disconnect: Callable[[str, str], None],
    ) -> None:
        """`on_message` receives a message and frames, `reopen` a lease to repeat `Open` for, `on_disconnect` a lost
        lease and the reason."""
        self._loop = loop
        self._wire = wire
        self._stats = stats
        self._on_message = on_message
        self._reopen = reopen
        self._on_disconnect = on_disconnect
        self._context: Context = zmq.Context(1)
        self._peers: dict[str, Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, address: str) -> PrefillLink:
        """Return the link to `host:port`, a new one if the last was lost. Raises `ValueError` if it is malformed."""
        peer = self._peers.get(address)
        if peer is None:
            host, port = split_address(address)
            peer = self._peers[address] = Peer(address, self._wire)
            peer.endpoints = look_up(host, port, lambda found: self._loop.post(partial(self._found, peer, found)))
            if peer.endpoints and not self._connect(peer):
                self._loop.post(partial(self._found, peer, []))
        return peer

    def tidy(self, now: float) -> float:
        """Close idle connections; return the seconds until the next one may time out."""
        idle = [peer for peer in self._peers.values() if not peer.leases]
        for peer in idle:
            if now >= peer.idle_since + _KEEP_SECONDS:
                self._drop(peer)
        return min((peer.idle_since + _KEEP_SECONDS - now for peer in idle), default=math.inf)

    def close(self) -> None:
        """Close every connection."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._context.term()

    def _connect(self, peer: Peer) -> bool:
        connecting = peer.connect(self._context)
        if peer.socket is not None and peer.monitor is not None:
            self._loop.watch(peer.socket, partial(self._handle, peer))
            self._loop.watch(peer.monitor, partial(self._check, peer))
        return connecting

    def _unwatch(self, peer: Peer) -> None:
        for source in (peer.socket, peer.monitor):
            if source is not None:
                self._loop.forget(source)

    def _drop(self, peer: Peer) -> None:
        self._unwatch(peer)
        del self._peers[peer.address]
        peer.close()

    def _found(self, peer: Peer, endpoints: list[Endpoint]) -> None:
        if self._peers.get(peer.address) is peer:
            peer.endpoints = endpoints
            self._next_endpoint(peer, "the prefill worker cannot be reached")

    def _check(self, peer: Peer, frames: list[zmq.Frame]) -> None:
        event = parse_monitor_message([frame.bytes for frame in frames])["event"]
        if (reason := peer.loss(event)) is not None:
            self._unwatch(peer)
            self._next_endpoint(peer, reason)

    def _next_endpoint(self, peer: Peer, reason: str) -> None:
        """Try the next endpoint; if there is none, the connection is lost."""
        if self._connect(peer):
            for lease in list(peer.leases):
                self._reopen(lease)
            return
        del self._peers[peer.address]
        for lease in list(peer.leases):
            self._on_disconnect(lease, reason)

    def _handle(self, peer: Peer, frames: list[zmq.Frame]) -> None:
        try:
            if len(frames) > _MAX_FRAMES:
                raise AuthenticationError("a message has too many frames")
            message = self._wire.open_from_prefill(frames[0].buffer)
        except (AuthenticationError, InvalidMessage):
            self._stats.dropped_frames += 1
        else:
            self._on_message(peer, message, [frame.buffer for frame in frames[1:]])
