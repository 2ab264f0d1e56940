"""Whole messages over a stream socket between processes of one machine, and arrays and outputs as frames.

No thread carries the messages, and nobody waits. Both ends run the same version.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.engine.process.messages import ClientMessage, EngineMessage
from fd_core.errors import EngineDead
from fd_core.types import StepOutput

_LENGTH: Final = Struct("<I")
_CHUNK: Final = 1 << 14
"""Bytes read at a time, so that whoever reads between other things gets its turn."""


class MessageStream:
    """One end of a connected socket, used from one thread; each message goes out behind its length.

    A message that the socket does not take yet is kept, see `unsent`; one for an end that is gone is lost.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over `sock`."""
        sock.setblocking(False)
        self._socket = sock
        self._arrived = bytearray()
        self._unsent = bytearray()
        self.ended = False
        """Whether the other end is gone and everything that it said was received."""

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
        if self._unsent:
            self._unsent += data
        elif (sent := self._write(data)) < len(data):
            self._unsent += data[sent:]

    def flush(self) -> None:
        """Send as much of what was kept as the socket takes."""
        if self._unsent:
            del self._unsent[: self._write(self._unsent)]

    def receive(self) -> list[bytes] | None:
        """Return messages that arrived, which may be none; None if there is nothing to read."""
        try:
            data = self._socket.recv(_CHUNK)
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
            end = start + _LENGTH.unpack_from(arrived, begin)[0]
            if end > len(arrived):
                break
            messages.append(bytes(arrived[start:end]))
            begin = end
        del arrived[:begin]
        return messages

    def close(self, linger: float = 0.0) -> None:
        """Send what was kept for up to `linger` seconds, then close; idempotent."""
        if self._unsent and linger:
            self._socket.settimeout(linger)
            with contextlib.suppress(OSError):
                self._socket.sendall(self._unsent)
        self._unsent.clear()
        self._socket.close()

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except ConnectionError:
            return len(data)


class EngineSocket:
    """The client's end, used from one event loop, which hands over messages; no task or future is made for one."""

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


class _Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    reason: str
    field: str | None


def encode_array(array: npt.NDArray[Any]) -> tuple[tuple[int, ...], str, bytes]:
    """Be msgspec's `enc_hook` for messages with arrays: return shape, type character and values in C order."""
    return array.shape, array.dtype.char, array.tobytes()


def decode_array(_: type, packed: tuple[tuple[int, ...], str, bytes]) -> npt.NDArray[Any]:
    """Be msgspec's `dec_hook`: return the array of which `encode_array` made `packed`."""
    shape, dtype, values = packed
    return np.frombuffer(values, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_DECODER: msgspec.msgpack.Decoder[StepOutput | _Failure] = msgspec.msgpack.Decoder(
    StepOutput | _Failure, dec_hook=decode_array
)


def encode_output(output: StepOutput | EngineDead) -> bytes:
    """Return the frame of an output, or of the reason why there is none."""
    if isinstance(output, EngineDead):
        return _ENCODER.encode(_Failure(output.message, output.field))
    return _ENCODER.encode(output)


def decode_output(frame: bytes) -> StepOutput | EngineDead:
    """Return what `encode_output` was given. Raises `msgspec.DecodeError` or `ValueError` for anything else."""
    read = _DECODER.decode(frame)
    return EngineDead(read.reason, field=read.field) if isinstance(read, _Failure) else read
