"""Messages between the two processes of the kit: a call of a connector or one of its ends, and the answer."""

from __future__ import annotations

import struct
from typing import BinaryIO, Final

import msgspec

_LENGTH: Final = struct.Struct("<I")


class Recipe(msgspec.Struct, frozen=True):
    """How to make a connector."""

    cls: str
    """`module:Class`."""
    kv_store: str | None
    timeout: float


class Call(msgspec.Struct, frozen=True):
    """A method call on `target`, the number of a connector or an end; what the call makes gets the number `made`."""

    method: str
    target: int
    made: int = 0
    lease: str = ""
    address: bytes = b""
    first: int = 0
    stop: int = 0
    window: int = 0
    value_bytes: int = 0
    index: int = 0
    reference: bytes = b""
    buffers: tuple[bytes, ...] = ()
    """Frames of a `take`, parts of a `put`."""
    recipe: Recipe | None = None


class Census(msgspec.Struct, frozen=True):
    """What a process holds: its descriptors, mappings and threads."""

    descriptors: tuple[str, ...]
    mapped: tuple[str, ...]
    """Names of shared memory and files."""
    threads: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True):
    """The answer to a call."""

    data: bytes = b""
    """Address, reference or value."""
    frames: tuple[bytes, ...] = ()
    census: Census | None = None
    refused: str | None = None
    """Text of a `ConnectorError`."""
    broken: str | None = None
    """Type and text of another error, which no connector may raise."""


def write(stream: BinaryIO, message: Call | Answer) -> None:
    """Write one message."""
    encoded = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(encoded)) + encoded)
    stream.flush()


def read(stream: BinaryIO) -> bytes | None:
    """Read one message, not decoded yet; None if the other process is gone."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    encoded = stream.read(length)
    return encoded if len(encoded) == length else None
