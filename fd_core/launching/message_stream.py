"""Whole messages over the socket between a process of this machine and its child, see `fd_core.launching.child`.

No thread carries the messages, and no end waits unless it asks to. Both ends run the same version.
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
"""Bytes read at a time, so that whoever reads between other things gets its turn."""


class MessageStream:
    """One end of a connected socket; each message goes out behind its length. One thread sends, and one receives.

    A message that the socket does not take yet is kept, see `unsent`; one for an end that is gone is lost. Memory is
    taken for what has arrived, whatever length was announced.
    """

    def __init__(self, sock: socket.socket, limit: int = _MAX_MESSAGE) -> None:
        """Take over `sock`. A message of more than `limit` bytes is taken for the end of the stream."""
        self._socket = sock
        self._limit = limit
        self._arrived = bytearray()
        self._unsent = bytearray()
        self.ended = False
        """Whether the other end is gone and everything that it said was received."""

    @classmethod
    def to_parent(cls) -> MessageStream:
        """Take over a child's standard input; no process that the child starts gets the socket."""
        stream = cls(socket.socket(fileno=os.dup(0)))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return stream

    def fileno(self) -> int:
        """Return the descriptor, to wait for."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits until the socket can be written to; then `flush` goes on."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message of less than 4 GiB, or keep what the socket does not take."""
        data = _LENGTH.pack(len(message)) + message
        self._unsent += data if self._unsent else data[self._write(data) :]

    def flush(self, *, wait: bool = False) -> None:
        """Send as much of what was kept as the socket takes, or `wait` until it took all."""
        while self._unsent and (sent := self._write(self._unsent, wait=wait)):
            del self._unsent[:sent]

    def receive(self, *, wait: bool = False) -> list[bytes] | None:
        """Return messages that arrived, which may be none; None if there is nothing to read, unless told to `wait`."""
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
        """Wait for each message until the other end is gone."""
        while not self.ended:
            yield from self.receive(wait=True) or ()

    def close(self, linger: float = 0.0) -> None:
        """Send what was kept for up to `linger` seconds, then close; idempotent."""
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
    """A parent's end, used from one event loop, which hands over messages; no task or future is made for one."""

    def __init__(
        self,
        sock: socket.socket,
        receive: Callable[[bytes], None],
        failed: Callable[[Exception], None],
        limit: int = _MAX_MESSAGE,
    ) -> None:
        """Take over `sock`. `failed` takes what `receive` raises, and an `EOFError` when the stream has ended."""
        self.received = 0
        """Messages that arrived; only grows."""
        self._receive = receive
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._stream = MessageStream(sock, limit)
        self._descriptor = self._stream.fileno()
        self._closed = False
        self._loop.add_reader(self._descriptor, self._read)

    @property
    def ended(self) -> bool:
        """Whether no message comes any more."""
        return self._stream.ended

    def send(self, message: bytes) -> None:
        """Queue a message; one for a child that is gone is lost."""
        self._stream.send(message)
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
        for message in self._stream.receive() or ():
            if self._closed:
                return
            try:
                self.received += 1
                self._receive(message)
            except Exception as error:  # noqa: BLE001 - nobody else sees what a callback of the event loop raises
                self._failed(error)
        if self._stream.ended and not self._closed:
            self._loop.remove_reader(self._descriptor)
            self._failed(EOFError("the other end is gone"))
