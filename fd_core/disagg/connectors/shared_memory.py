"""Shared memory: both workers map one segment for each lease, with a place for each piece on its way.

    bytes 0 .. window - 1     state of each place: free, or full from its `put` until its `done`
    then `window` places      of `value_bytes` each, aligned to 64 bytes

The prefill side writes to a free place and marks it full; the decode side reads the place and marks it free. Place and
length of a value travel in its reference, behind the seal of the message, so nothing in the memory has to be trusted.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from fd_core.disagg.connectors.contract import (
    Bytes,
    Connector,
    ConnectorError,
    ConnectorSettings,
    KVInbox,
    KVOutbox,
    PutResult,
    flat_parts,
)
from fd_core.disagg.connectors.segment import Segment, attach, create
from fd_core.errors import ConfigError

_ALIGNMENT: Final = 64
_REFERENCE: Final = struct.Struct("<II")
"""Place, length in bytes."""
_FREE: Final = 0
_FULL: Final = 1


class _SegmentLayout(NamedTuple):
    window: int
    value_bytes: int

    @property
    def size(self) -> int:
        return self.start(self.window)

    def start(self, place: int) -> int:
        return _aligned(self.window) + place * _aligned(self.value_bytes)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class SharedMemoryConnector(Connector):
    """For workers on one host that see each other's processes and run as one user."""

    name = "shared_memory"

    def __init__(self, settings: ConnectorSettings) -> None:
        super().__init__(settings)
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "the connector shared_memory needs Linux", field="--kv-connector", hint="use --kv-connector tcp"
            )

    def open_inbox(self, lease: str, *, pieces: range, window: int, value_bytes: int) -> KVInbox:
        """Return an inbox with a segment of `window` places."""
        return _SharedMemoryInbox(lease, _SegmentLayout(window, value_bytes))

    def open_outbox(self, lease: str, address: bytes, *, window: int, value_bytes: int) -> KVOutbox:
        """Map the inbox's segment."""
        return _SharedMemoryOutbox(lease, address, _SegmentLayout(window, value_bytes))


class _SharedMemoryInbox(KVInbox):
    def __init__(self, lease: str, layout: _SegmentLayout) -> None:
        self._layout = layout
        self._segment: Segment | None = create(lease, layout.size)
        self.address = self._segment.address

    def take(self, index: int, reference: bytes, frames: Sequence[Bytes]) -> Bytes:
        if self._segment is None:
            raise ConnectorError("the lease is over")
        if frames:
            raise ConnectorError("a piece that lies in shared memory came behind its message as well")
        place, length = self._read(reference)
        if self._segment.bytes[place] != _FULL:
            raise ConnectorError("a reference leads to a place in shared memory that nothing was put in")
        start = self._layout.start(place)
        return self._segment.bytes[start : start + length].toreadonly()

    def done(self, index: int, reference: bytes) -> None:
        place, _ = self._read(reference)
        if self._segment is not None:
            self._segment.bytes[place] = _FREE

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _read(self, reference: bytes) -> tuple[int, int]:
        if len(reference) != _REFERENCE.size:
            raise ConnectorError("a reference to shared memory cannot be read")
        place, length = _REFERENCE.unpack(reference)
        if place >= self._layout.window or length > self._layout.value_bytes:
            raise ConnectorError("a reference to shared memory leads out of it")
        return place, length


class _SharedMemoryOutbox(KVOutbox):
    def __init__(self, lease: str, address: bytes, layout: _SegmentLayout) -> None:
        self._layout = layout
        self._segment: Segment | None = attach(lease, address, layout.size)

    def put(self, index: int, parts: Sequence[Bytes]) -> PutResult:
        if self._segment is None:
            raise ConnectorError("the lease is over")
        flat, length = flat_parts(parts, self._layout.value_bytes)
        memory = self._segment.bytes
        place = bytes(memory[: self._layout.window]).find(_FREE)
        if place < 0:
            raise ConnectorError("no place in shared memory is free")
        start = self._layout.start(place)
        for part in flat:
            memory[start : start + len(part)] = part
            start += len(part)
        memory[place] = _FULL
        return PutResult(_REFERENCE.pack(place, length))

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
