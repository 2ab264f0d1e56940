"""Layout of a lease's memory, the same on both sides, and the messages about its places.

    16 bytes                  the lease's token: whoever reads it has found this lease's memory
    4 bytes, `window` times   how often each place was freed, written by the decode side alone
    then `window` places      of `value_bytes` each; each aligned to 64 bytes

The n-th value in a place has the turn n. The prefill side may write to a place that was freed as often as it was
written to, and reads the counts to find out. So each count has one writer and never decreases.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from fd_core.disagg.connectors.contract import ConnectorError

TOKEN_BYTES: Final = 16
_ALIGNMENT: Final = 64
_COUNT: Final = struct.Struct("<I")
_REFERENCE: Final = struct.Struct("<III")
_NOTICE: Final = struct.Struct(f"<{TOKEN_BYTES}sq{_REFERENCE.size}s")


class Layout(NamedTuple):
    """Offsets in the memory of a lease."""

    window: int
    value_bytes: int

    @property
    def header_bytes(self) -> int:
        """Length of the token and the counts, with which the memory begins."""
        return TOKEN_BYTES + self.window * _COUNT.size

    @property
    def size(self) -> int:
        """Size of the memory in bytes."""
        return self.start(self.window)

    def start(self, place: int) -> int:
        """Return where a place begins."""
        return _aligned(self.header_bytes) + place * _aligned(self.value_bytes)

    def write_header(self, memory: memoryview, token: bytes) -> None:
        """Begin a lease, in which no place was freed yet."""
        memory[: self.header_bytes] = token + bytes(self.window * _COUNT.size)

    def write_count(self, memory: memoryview, place: int, count: int) -> None:
        """Write how often a place was freed."""
        _COUNT.pack_into(memory, TOKEN_BYTES + place * _COUNT.size, count)

    def read_header(self, memory: memoryview) -> tuple[bytes, list[int]]:
        """Return the token, and how often each place was freed."""
        counts = struct.unpack_from(f"<{self.window}I", memory, TOKEN_BYTES)
        return bytes(memory[:TOKEN_BYTES]), list(counts)


class Reference(NamedTuple):
    """Location of a value."""

    place: int
    turn: int
    length: int

    def encode(self) -> bytes:
        """Return the value of `KVPiece.reference`."""
        return _REFERENCE.pack(*self)

    @classmethod
    def decode(cls, encoded: bytes) -> Reference:
        """Read a `KVPiece.reference`. Raises `ConnectorError`."""
        if len(encoded) != _REFERENCE.size:
            raise ConnectorError("a reference to a place of NIXL cannot be read")
        return cls(*_REFERENCE.unpack(encoded))


class Notice(NamedTuple):
    """The notice that follows a write; with an index below 0, the one that follows the last write of a lease."""

    token: bytes
    piece: int
    reference: Reference

    @classmethod
    def of_the_end(cls, token: bytes) -> Notice:
        """Return the notice that nothing more will be written for a lease."""
        return cls(token, -1, Reference(0, 0, 0))

    @property
    def ends(self) -> bool:
        """Whether nothing more will be written."""
        return self.piece < 0

    def encode(self) -> bytes:
        """Return the bytes that NIXL carries."""
        return _NOTICE.pack(self.token, self.piece, self.reference.encode())

    @classmethod
    def decode(cls, encoded: bytes) -> Notice | None:
        """Read a notice that somebody sent; None for other bytes."""
        if len(encoded) != _NOTICE.size:
            return None
        token, piece, reference = _NOTICE.unpack(encoded)
        return cls(token, piece, Reference.decode(reference))


def _aligned(length: int) -> int:
    return -(-max(length, 1) // _ALIGNMENT) * _ALIGNMENT
