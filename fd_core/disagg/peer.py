"""The connection of a decode worker to one prefill worker."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

__all__ = ["Endpoint", "Frames", "Peer", "look_up", "split_address"]

Frames = list["zmq.Frame"]
Endpoint = tuple[str, bool]
"""What ZeroMQ connects to, and whether it is IPv6."""

_LINGER_MS: Final = 200
"""For what was said last."""
_CONNECT_MS: Final = 3000
_MAX_FRAMES: Final = 16
_BATCH: Final = 64
"""Messages in one go, so that no peer keeps the others waiting."""
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
    """Return host, without brackets, and port of `host:port`. Raises `ValueError` for what is none."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
        raise ValueError("an address is host:port")
    return host, int(port)


def look_up(host: str, port: int, found: Callable[[list[Endpoint]], object]) -> list[Endpoint]:
    """Return the endpoint of an address in numbers; for a name, nothing, and tell `found` later, on a thread.

    Name servers may take their time: no connection of another peer is to wait for them.
    """
    try:
        return [_endpoint(str(ipaddress.ip_address(host)), port)]
    except ValueError:
        pass

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            infos = []
        found(list(dict.fromkeys(_endpoint(str(info[4][0]), port) for info in infos)))

    threading.Thread(target=ask, name="fdcore-kv-names", daemon=True).start()
    return []


def _endpoint(address: str, port: int) -> Endpoint:
    six = ":" in address
    return (f"tcp://[{address}]:{port}" if six else f"tcp://{address}:{port}"), six


class Peer:
    """A DEALER and its monitor. A connection that is lost stays lost: whoever has another lease makes another peer."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.leases: set[str] = set()
        self.idle_since = 0.0
        self.endpoints: list[Endpoint] = []
        """Those that were not tried."""
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self._connected = False

    def connect(self, context: zmq.Context[zmq.Socket[bytes]], max_frame: int) -> bool:
        """Begin to connect to the next endpoint; return False if none is left. What was sent before is lost."""
        self.close()
        while self.endpoints and not self._connected:
            endpoint, six = self.endpoints.pop(0)
            dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
            dealer.ipv6 = six
            dealer.linger = 0
            dealer.sndhwm = 0  # leases are bounded, and with them what is said
            dealer.maxmsgsize = max_frame
            dealer.connect_timeout = _CONNECT_MS
            self.socket, self.monitor = dealer, dealer.get_monitor_socket(_EVENTS)
            try:
                dealer.connect(endpoint)
                return True
            except zmq.ZMQError:
                self.close()
        return False

    def send(self, frame: bytes) -> None:
        """Send a message; queued until there is a connection, lost if its endpoint is not known."""
        if self.socket is not None:
            self.socket.send(frame, zmq.NOBLOCK)

    def received(self) -> Iterator[Frames]:
        """Yield messages that arrived, at most a batch of them. Each has a frame at least."""
        for _ in range(_BATCH):
            if self.socket is None:
                return
            try:
                frames: Frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield frames if len(frames) <= _MAX_FRAMES else [zmq.Frame()]

    def loss(self) -> str | None:
        """Say what became of the connection, None as long as nothing bad did."""
        while self.monitor is not None:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return None
            if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                broke = "the connection to the prefill worker broke"
                return broke if self._connected else "the prefill worker cannot be reached"
            self._connected = True
        return None

    def close(self) -> None:
        """Give the sockets up; what was said last may still leave."""
        if self.socket is not None and self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=_LINGER_MS)
        self.socket = self.monitor = None
