"""Layout of a lease's memory, the same on both sides, its address, and the state of its slots.

    16 bytes                  the lease's token, which identifies its memory
    4 bytes, `window` times   number of times that each slot was freed, written only by the decode side
    then `window` slots       of `value_bytes` each; each aligned to 64 bytes

The n-th value in a slot has turn n. The prefill side may write to a slot that was freed as often as it was written,
according to the counts. So each count has one writer and never decreases.

The address for writes is only sent in the sealed `Open` of a lease.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Final, NamedTuple

import msgspec
from fd_core.disagg.connectors.contract import MAX_ADDRESS_BYTES, ConnectorError

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
        """Length of the token and the counts at the start of the memory."""
        return TOKEN_BYTES + self.window * _COUNT.size

    @property
    def size(self) -> int:
        """Size of the memory in bytes."""
        return self.start(self.window)

    def start(self, slot: int) -> int:
        """Return the offset of a slot."""
        return _aligned(self.header_bytes) + slot * _aligned(self.value_bytes)

    def write_header(self, memory: memoryview, token: bytes) -> None:
        """Begin a lease with all free counts 0."""
        memory[: self.header_bytes] = token + bytes(self.window * _COUNT.size)

    def write_count(self, memory: memoryview, slot: int, count: int) -> None:
        """Write the free count of a slot."""
        _COUNT.pack_into(memory, TOKEN_BYTES + slot * _COUNT.size, count)

    def read_header(self, memory: memoryview) -> tuple[bytes, list[int]]:
        """Return the token and the free counts."""
        counts = struct.unpack_from(f"<{self.window}I", memory, TOKEN_BYTES)
        return bytes(memory[:TOKEN_BYTES]), list(counts)


class Reference(NamedTuple):
    """Location of a value."""

    slot: int
    turn: int
    length: int

    def encode(self) -> bytes:
        """Return the value of `KVPiece.reference`."""
        return _REFERENCE.pack(*self)

    @classmethod
    def decode(cls, encoded: bytes) -> Reference:
        """Read a `KVPiece.reference`. Raises `ConnectorError`."""
        if len(encoded) != _REFERENCE.size:
            raise ConnectorError("a reference to a slot of NIXL is malformed")
        return cls(*_REFERENCE.unpack(encoded))


class Notice(NamedTuple):
    """Notification after a write; with an index below 0, the one after the last write of a lease."""

    token: bytes
    piece: int
    reference: Reference

    @classmethod
    def of_the_end(cls, token: bytes) -> Notice:
        """Return the notification of the end of a lease's writes."""
        return cls(token, -1, Reference(0, 0, 0))

    @property
    def ends(self) -> bool:
        """True if there are no further writes."""
        return self.piece < 0

    def encode(self) -> bytes:
        """Return the encoded notification."""
        return _NOTICE.pack(self.token, self.piece, self.reference.encode())

    @classmethod
    def decode(cls, encoded: bytes) -> Notice | None:
        """Decode a received notification; None for other bytes."""
        if len(encoded) != _NOTICE.size:
            return None
        token, piece, reference = _NOTICE.unpack(encoded)
        return cls(token, piece, Reference.decode(reference))


def _aligned(length: int) -> int:
    return -(-max(length, 1) // _ALIGNMENT) * _ALIGNMENT


_DIGEST_BYTES: Final = 16


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Location of the memory of a lease."""

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    """The first bytes of the memory."""
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """Name of the decode side's agent."""
    start: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    """Start of the memory in the decode side's process."""
    size: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    metadata: bytes
    """NIXL metadata of that agent and of only this memory."""


def write_address(lease: str, address: Address) -> bytes:
    """Return the value of `Open.address`. Raises `ConnectorError` if it would be too long."""
    encoded = msgspec.msgpack.encode(address)
    encoded = _digest(lease, encoded) + encoded
    if len(encoded) > MAX_ADDRESS_BYTES:
        raise ConnectorError(
            f"NIXL's metadata of this worker has {len(encoded):,} bytes, which exceeds {MAX_ADDRESS_BYTES:,}",
            hint="set fewer devices in FD_NIXL_NET_DEVICES",
        )
    return encoded


def read_address(lease: str, encoded: bytes) -> Address:
    """Read an `Open.address`. Raises `ConnectorError`.

    The digest does not authenticate the sender, which the seal does. It protects NIXL, which has no checks, from
    damaged addresses and those of other leases.
    """
    if len(encoded) > MAX_ADDRESS_BYTES:
        raise ConnectorError("the address for NIXL is too long")
    digest, rest = encoded[:_DIGEST_BYTES], encoded[_DIGEST_BYTES:]
    if digest != _digest(lease, rest):
        raise ConnectorError("the address for NIXL is damaged or belongs to another lease")
    try:
        return msgspec.msgpack.decode(rest, type=Address)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConnectorError("the address for NIXL is malformed") from error


def _digest(lease: str, encoded: bytes) -> bytes:
    named = len(lease.encode()).to_bytes(4, "little") + lease.encode() + encoded
    return blake2b(named, digest_size=_DIGEST_BYTES, person=b"fd_core nixl").digest()


class ReceiverSlots:
    """State of the decode side: the piece that has arrived in each slot, and how often each slot was freed."""

    def __init__(self, pieces: range, window: int, value_bytes: int) -> None:
        self._pieces, self._value_bytes = pieces, value_bytes
        self._freed = [0] * window
        self._holders: dict[int, int] = {}
        """Index of the piece in each occupied slot."""
        self._arrived: dict[int, Reference] = {}
        self._done: set[int] = set()

    @property
    def complete(self) -> bool:
        """True if every piece has arrived and been freed, so that no writer remains."""
        return len(self._done) == len(self._pieces)

    def landed(self, index: int, reference: Reference) -> None:
        """Record the completed write of a piece; ignores one that cannot have been written."""
        if self._expected(index, reference):
            self._holders[reference.slot] = index
            self._arrived[index] = reference

    def check(self, index: int, reference: Reference) -> bool:
        """Return True if the piece of a reference has arrived. Raises `ConnectorError` if it never will."""
        if index in self._arrived:
            if self._arrived[index] != reference:
                raise ConnectorError("a reference points to another slot than the one with the piece")
            return True
        if not self._expected(index, reference):
            raise ConnectorError("a reference points to a slot that cannot hold the piece")
        return False

    def done(self, index: int, reference: Reference) -> int:
        """Free the slot of an arrived piece; return the free count of the slot."""
        if not self.check(index, reference):
            raise ConnectorError("a piece is marked as done before its arrival")
        del self._arrived[index], self._holders[reference.slot]
        self._done.add(index)
        self._freed[reference.slot] += 1
        return self._freed[reference.slot]

    def _expected(self, index: int, reference: Reference) -> bool:
        slot, turn, length = reference
        return (
            index in self._pieces
            and index not in self._done
            and index not in self._arrived
            and slot < len(self._freed)
            and slot not in self._holders
            and turn == self._freed[slot] + 1
            and length <= self._value_bytes
        )


class SenderSlots:
    """State of the prefill side: how often each slot was written to and, at the last poll, freed."""

    def __init__(self, window: int) -> None:
        self._written = [0] * window
        self._freed = [0] * window

    def free(self) -> int | None:
        """Return the least recently written free slot; None if none is known to be free."""
        places = [slot for slot, written in enumerate(self._written) if written == self._freed[slot]]
        return min(places, key=self._written.__getitem__, default=None)

    def write(self, slot: int) -> int:
        """Record a write to a slot; return its turn."""
        self._written[slot] += 1
        return self._written[slot]

    def learn(self, freed: Sequence[int]) -> None:
        """Update the counts from the decode side's memory. Raises `ConnectorError` if they are invalid."""
        if any(not old <= new <= most for old, new, most in zip(self._freed, freed, self._written, strict=True)):
            raise ConnectorError("the decode worker's memory does not match this lease")
        self._freed = list(freed)
