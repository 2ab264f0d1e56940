"""The connection of a decode worker to one prefill worker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

__all__ = ["Frames", "Peer"]

Frames = list["zmq.Frame"]

_LINGER_MS: Final = 200
"""For what was said last."""
_CONNECT_MS: Final = 3000
_MAX_FRAMES: Final = 16
_BATCH: Final = 64
"""Messages in one go, so that no peer keeps the others waiting."""
_LOSSES: Final = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS: Final = _LOSSES | zmq.EVENT_HANDSHAKE_SUCCEEDED
_NUMBERS: Final = re.compile(r"[0-9.]+")


class Peer:
    """A DEALER and its monitor. A connection that is lost stays lost: whoever has another lease makes another peer."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, max_frame: int) -> None:
        """Begin to connect to `host:port`. Raises `zmq.ZMQError` for what cannot be an address."""
        host = address.rpartition(":")[0]
        self.address = address
        self.leases: set[str] = set()
        self.idle_since = 0.0
        self.connected = False
        self._context = context
        self._max_frame = max_frame
        # ZeroMQ takes the first address of a name, so that a name is tried for either family, one after the other.
        self._families = [True] if host.startswith("[") else [False] if _NUMBERS.fullmatch(host) else [False, True]
        self._connect()

    def again(self) -> bool:
        """Connect in the other family, if a name was not tried for it yet; what was sent before is lost."""
        if self.connected or not self._families:
            return False
        self.close()
        try:
            self._connect()
        except zmq.ZMQError:
            return False
        return True

    def send(self, frame: bytes) -> None:
        """Send a message; queued until there is a connection."""
        self.socket.send(frame, zmq.NOBLOCK)

    def received(self) -> Iterator[Frames]:
        """Yield messages that arrived, at most a batch of them. Each has a frame at least."""
        for _ in range(_BATCH):
            if self.socket.closed:
                return
            try:
                frames: Frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield frames if len(frames) <= _MAX_FRAMES else [zmq.Frame()]

    def loss(self) -> str | None:
        """Say what became of the connection, None as long as nothing bad did."""
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return None
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
            elif self.connected:
                return "the connection to the prefill worker broke"
            else:
                return "the prefill worker cannot be reached"

    def close(self) -> None:
        """Give the sockets up; what was said last may still leave."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=_LINGER_MS)

    def _connect(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        try:
            self.socket.ipv6 = self._families.pop(0)
            self.socket.linger = 0
            self.socket.sndhwm = 0  # leases are bounded, and with them what is said
            self.socket.maxmsgsize = self._max_frame
            self.socket.connect_timeout = _CONNECT_MS
            self.monitor = self.socket.get_monitor_socket(_EVENTS)
            self.socket.connect(f"tcp://{self.address}")
        except zmq.ZMQError:
            self.socket.disable_monitor()
            self.socket.close(linger=0)
            raise
