"""The socket to an engine's process: `send` never waits, and the event loop hands over every message that arrives.

No task, no future and no thread is made for a message.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import msgspec

from fd_core.engine.process.message_stream import MessageStream
from fd_core.engine.process.messages import ClientMessage, EngineMessage


class EngineSocket:
    """The client's end of a pair of sockets, used from one event loop."""

    def __init__(
        self, sock: socket.socket, receive: Callable[[EngineMessage], None], failed: Callable[[Exception], None]
    ) -> None:
        """Take over `sock`. What `receive` raises, and what cannot be decoded, is given to `failed`."""
        self.received = 0
        """Messages that arrived; only grows."""
        self._receive = receive
        self._failed = failed
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._loop = asyncio.get_running_loop()
        self._stream = MessageStream(sock)
        self._descriptor = self._stream.fileno()
        self._closed = False
        self._loop.add_reader(self._descriptor, self._read)

    def send(self, message: ClientMessage) -> None:
        """Queue a message; one for an engine that is gone is lost."""
        self._stream.send(self._encoder.encode(message))
        if self._stream.unsent:
            self._loop.add_writer(self._descriptor, self._flush)

    def close(self) -> None:
        """Hand nothing over any more; idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)
            self._stream.close()

    def _flush(self) -> None:
        self._stream.flush()
        if not self._stream.unsent:
            self._loop.remove_writer(self._descriptor)

    def _read(self) -> None:
        messages = self._stream.receive()
        if self._stream.ended:
            self._loop.remove_reader(self._descriptor)
        for message in messages or ():
            if self._closed:
                return
            try:
                self.received += 1
                self._receive(self._decoder.decode(message))
            except Exception as error:  # noqa: BLE001 - nobody else sees what a callback of the event loop raises
                self._failed(error)
