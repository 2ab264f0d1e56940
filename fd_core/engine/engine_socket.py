"""The socket to an engine's process: `send` never waits, and the event loop hands over every message that arrives.

No task and no future is made for a message. The descriptor of a ZeroMQ socket is readable once for each change, so the
reader continues until no message is left, and looks again after each send, which may consume the readiness.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import msgspec
import zmq

from fd_core.engine.messages import ClientMessage, EngineMessage

__all__ = ["EngineSocket"]

_BATCH: Final = 64
"""Messages that are handed over before the event loop gets its turn."""


class EngineSocket:
    """One end of a pair of sockets, used from one event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        receive: Callable[[EngineMessage], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Listen at `address`. What `receive` raises, and what cannot be decoded, is given to `failed`."""
        self.received = 0
        """Messages that arrived; only grows."""
        self._receive = receive
        self._failed = failed
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(address)
        self._descriptor = self._socket.FD
        self._loop.add_reader(self._descriptor, self._read)

    def send(self, message: ClientMessage) -> None:
        """Queue a message; one for an engine that is gone is lost."""
        with contextlib.suppress(zmq.Again):
            # The high-water mark is off: a send waits only where there is no engine.
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def close(self) -> None:
        """Hand nothing over any more; idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close()

    def _read(self) -> None:
        try:
            for _ in range(_BATCH):
                if self._socket.closed:
                    return
                message: EngineMessage = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
                self.received += 1
                self._receive(message)
        except zmq.Again:
            return
        except Exception as error:  # noqa: BLE001 - nobody else sees what a callback of the event loop raises
            self._failed(error)
        self._loop.call_soon(self._read)
