"""Whole messages over the socket between a process of this machine and its child, see `fd_core.launching.child`.

No thread carries the messages, and neither end blocks unless `wait` is set. Both ends run the same version.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final

_LENGTH: Final = Struct("<I")
_MAX_MESSAGE: Final = 2**32 - 1
_CHUNK: Final = 1 << 14
"""Bytes read at a time, so that a reader with other work gets its turn."""


class MessageStream:
    """One end of a connected socket; each message is preceded by its length. One thread sends, and one receives.

    A message that the socket does not accept yet is kept, see `unsent`; one for a closed end is lost. Memory is
    allocated for the bytes that arrived, regardless of the announced length.
    """

    def __init__(self, sock: socket.socket, limit: int = _MAX_MESSAGE) -> None:
        """Take over `sock`. A message of more than `limit` bytes counts as the end of the stream."""
        self._socket = sock
        self._limit = limit
        self._arrived = bytearray()
        self._unsent = bytearray()
        self.ended = False
        """True if the other end is closed and everything that it sent was received."""

    @classmethod
    def to_parent(cls) -> MessageStream:
        """Take over a child's standard input; no process that the child starts gets the socket."""
        stream = cls(socket.socket(fileno=os.dup(0)))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return stream

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """True if data waits for the socket to become writable; then call `flush`."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message of less than 4 GiB, or keep the part that the socket does not accept."""
        data = _LENGTH.pack(len(message)) + message
        self._unsent += data if self._unsent else data[self._write(data) :]

    def flush(self, *, wait: bool = False) -> None:
        """Send as much of the kept data as the socket accepts, or `wait` until all is sent."""
        while self._unsent and (sent := self._write(self._unsent, wait=wait)):
            del self._unsent[:sent]

    def receive(self, *, wait: bool = False) -> list[bytes] | None:
        """Return the received messages, possibly none; None if there is nothing to read, unless `wait` is set."""
        try:
            data = b"" if self.ended else self._socket.recv(_CHUNK, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionError:
            data = b""
        if not data:
            self.ended = True
            return None
        arrived = self._arrived
        arrived += data
        messages, begin = [], 0
        while (start := begin + _LENGTH.size) <= len(arrived):
            size = _LENGTH.unpack_from(arrived, begin)[0]
            self.ended = size > self._limit
            if self.ended or start + size > len(arrived):
                break
            begin = start + size
            messages.append(bytes(arrived[start:begin]))
        del arrived[:begin]
        return messages

    def __iter__(self) -> Iterator[bytes]:
        """Wait for each message until the other end is closed."""
        while not self.ended:
            yield from self.receive(wait=True) or ()

    def close(self, linger: float = 0.0) -> None:
        """Send kept data for up to `linger` seconds, then close; idempotent."""
        if self._unsent and linger:
            self._socket.settimeout(linger)
            with contextlib.suppress(OSError):
                self._socket.sendall(self._unsent)
        self._unsent.clear()
        self._socket.close()

    def _write(self, data: bytes | bytearray, *, wait: bool = False) -> int:
        try:
            return self._socket.send(data, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except ConnectionError:
            return len(data)


class MessageSocket:
    """A parent's end, used from one event loop, which delivers messages; no task or future is created per message."""

    def __init__(
        self,
        sock: socket.socket,
        receive: Callable[[bytes], None],
        failed: Callable[[Exception], None],
        limit: int = _MAX_MESSAGE,
    ) -> None:
        """Take over `sock`. `failed` receives what `receive` raises, and an `EOFError` when the stream has ended."""
        self.received = 0
        """Messages received; only grows."""
        self._receive = receive
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._stream = MessageStream(sock, limit)
        self._descriptor = self._stream.fileno()
        self._closed = False
        self._loop.add_reader(self._descriptor, self._read)

    @property
    def ended(self) -> bool:
        """True if no further message will arrive."""
        return self._stream.ended

    def send(self, message: bytes) -> None:
        """Queue a message; one for a child that has ended is lost."""
        self._stream.send(message)
        if self._stream.unsent:
            self._loop.add_writer(self._descriptor, self._flush)

    def close(self) -> None:
        """Stop delivering messages; idempotent."""
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
        for message in self._stream.receive() or ():
            if self._closed:
                return
            try:
                self.received += 1
                self._receive(message)
            except Exception as error:  # noqa: BLE001 - otherwise lost in the callback of the event loop
                self._failed(error)
        if self._stream.ended and not self._closed:
            self._loop.remove_reader(self._descriptor)
            self._failed(EOFError("the other end is closed"))
