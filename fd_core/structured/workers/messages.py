"""What a server and its grammar processes send to each other: frames of a length and as many bytes."""

from __future__ import annotations

import socket
import struct
from typing import IO, Final

import msgspec

INVALID: Final = "invalid_grammar"
"""The code of errors about a form."""
LENGTH: Final = struct.Struct("<I")
CPU_SECONDS: Final = 2
"""Processor time that one task may take, up to one second more as the system counts it."""


class Unenforced(msgspec.Struct, frozen=True):
    """A part of a schema that an answer may not keep."""

    param: str
    """Its place in the request."""
    message: str


class FormOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a task: a grammar that can be compiled, or why there is none."""

    grammar: str = ""
    warnings: tuple[Unenforced, ...] = ()
    cpu_seconds: float = 0.0
    message: str = ""
    """Why there is no grammar, for people; empty if there is one."""
    field: str | None = None
    code: str | None = None


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next frame, None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(peer: socket.socket, body: bytes) -> None:
    """Send a frame."""
    peer.sendall(LENGTH.pack(len(body)) + body)
