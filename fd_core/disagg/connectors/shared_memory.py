"""Shared memory: both workers map one segment per lease, with a buffer for each piece in flight.

    bytes 0 .. window - 1     state of each buffer: free, or full from its `put` until its `done`
    then `window` buffers     of `value_bytes` each, aligned to 64 bytes

The prefill side writes to a free buffer and marks it full; the decode side reads the buffer and marks it free. Index
and length of a value are in its reference, inside the sealed message, so no content of the memory has to be trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from fd_core.disagg.connectors import contract
from fd_core.errors import ConfigError

_ALIGNMENT: Final = 64
_REFERENCE: Final = struct.Struct("<II")
"""Buffer index, length in bytes."""
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


class SharedMemoryConnector(contract.Connector):
    """Connector for workers on one host that share a PID namespace and run as one user."""

    name = "shared_memory"

    def __init__(self, settings: contract.ConnectorSettings) -> None:
        super().__init__(settings)
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "the connector shared_memory needs Linux", field="--kv-connector", hint="use --kv-connector tcp"
            )

    def open_inbox(self, lease: str, *, pieces: range, window: int, value_bytes: int) -> contract.KVInbox:
        """Return an inbox with a segment of `window` buffers."""
        return _SharedMemoryInbox(lease, _SegmentLayout(window, value_bytes))

    def open_outbox(self, lease: str, address: bytes, *, window: int, value_bytes: int) -> contract.KVOutbox:
        """Map the inbox's segment."""
        return _SharedMemoryOutbox(lease, address, _SegmentLayout(window, value_bytes))


class _SharedMemoryInbox(contract.KVInbox):
    def __init__(self, lease: str, layout: _SegmentLayout) -> None:
        self._layout = layout
        self._segment: Segment | None = create(lease, layout.size)
        self.address = self._segment.address

    def take(self, index: int, reference: bytes, frames: Sequence[contract.Bytes]) -> contract.Bytes:
        if self._segment is None:
            raise contract.ConnectorError("the lease is over")
        if frames:
            raise contract.ConnectorError("a piece in shared memory was also sent as a frame")
        place, length = self._read(reference)
        if self._segment.bytes[place] != _FULL:
            raise contract.ConnectorError("a reference points to an empty buffer of shared memory")
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
            raise contract.ConnectorError("a reference to shared memory is malformed")
        place, length = _REFERENCE.unpack(reference)
        if place >= self._layout.window or length > self._layout.value_bytes:
            raise contract.ConnectorError("a reference to shared memory is out of range")
        return place, length


class _SharedMemoryOutbox(contract.KVOutbox):
    def __init__(self, lease: str, address: bytes, layout: _SegmentLayout) -> None:
        self._layout = layout
        self._segment: Segment | None = attach(lease, address, layout.size)

    def put(self, index: int, parts: Sequence[contract.Bytes]) -> contract.PutResult:
        if self._segment is None:
            raise contract.ConnectorError("the lease is over")
        flat, length = contract.flat_parts(parts, self._layout.value_bytes)
        memory = self._segment.bytes
        place = bytes(memory[: self._layout.window]).find(_FREE)
        if place < 0:
            raise contract.ConnectorError("no buffer of shared memory is free")
        start = self._layout.start(place)
        for part in flat:
            memory[start : start + len(part)] = part
            start += len(part)
        memory[place] = _FULL
        return contract.PutResult(_REFERENCE.pack(place, length))

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


_LEASE: Final = re.compile(r"[0-9A-Za-z_.-]{1,64}")
_TOKEN_BYTES: Final = 16
_MAX_BYTES: Final = 1 << 30
"""Limit of one segment: the system does not limit the size of an anonymous file."""

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _SegmentAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Address of a segment; other users cannot open the segment with it."""

    host: str
    """Identifier of the host's current boot."""
    processes: int
    """Inode of the PID namespace that `process` belongs to."""
    process: _Number
    descriptor: _Number
    token: Annotated[bytes, msgspec.Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]
    """Part of the file's name, which distinguishes the segment from another file with the same descriptor number."""


class Segment:
    """Memory segment of two processes: one creates it, the other attaches, and it is freed with the last of them.

    It is an anonymous file (memfd), so it has no name that another process could claim first or that a crash could
    leave over. The other process opens the file through the creator's descriptor, which the system permits to the same
    user only, and checks the file before it opens it. The file is sealed: no process can shorten it while another uses
    it. Not safe to use from several threads at once.
    """

    def __init__(self, descriptor: int, size: int, address: bytes = b"") -> None:
        """Map `size` bytes and own the descriptor from here on."""
        self.address = address
        self._descriptor = descriptor
        try:
            self._mapped = mmap.mmap(descriptor, size)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise contract.ConnectorError(f"shared memory of {size:,} bytes cannot be mapped: {error}") from error
        self.bytes = memoryview(self._mapped)
        """uint8[size]"""
        self._closed = False

    def close(self) -> None:
        """Unmap the memory. Views of `bytes` that are still referenced stay valid and hold the mapping."""
        if self._closed:
            return
        self._closed = True
        self.bytes.release()
        with contextlib.suppress(BufferError):
            self._mapped.close()
        os.close(self._descriptor)


def create(lease: str, size: int) -> Segment:
    """Create a segment of `size` zero bytes for a lease. Raises `ConnectorError` if there is not enough memory."""
    if size > _MAX_BYTES:
        message = f"a lease needs {size:,} bytes of shared memory, which exceeds the limit of {_MAX_BYTES:,}"
        raise contract.ConnectorError(message, hint="use --kv-connector tcp")
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        host, processes = _here()
        descriptor = os.memfd_create(_name(lease, token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            # Writing to unallocated memory would kill the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        raise contract.ConnectorError(
            f"cannot allocate {size:,} bytes of shared memory: {error.strerror or error}"
        ) from error
    address = _SegmentAddress(host, processes, os.getpid(), descriptor=descriptor, token=token)
    return Segment(descriptor, size, msgspec.msgpack.encode(address))


def attach(lease: str, address: bytes, size: int) -> Segment:
    """Open the segment of a lease that another process created. Raises `ConnectorError` if the address is another
    file."""
    if len(address) > contract.MAX_ADDRESS_BYTES:
        raise contract.ConnectorError("the address of shared memory is too long")
    try:
        found = msgspec.msgpack.decode(address, type=_SegmentAddress)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise contract.ConnectorError("the address of shared memory is malformed") from error
    try:
        if (found.host, found.processes) != _here():
            message = "the decode worker runs on another host, or in a container with another PID namespace"
            raise contract.ConnectorError(message, hint="use --kv-connector tcp, or share the PID namespace")
        descriptor = _open(f"/proc/{found.process}/fd/{found.descriptor}", _name(lease, found.token), size)
    except OSError as error:
        raise contract.ConnectorError(
            f"the decode worker's shared memory cannot be opened: {error.strerror}"
        ) from error
    return Segment(descriptor, size)


def _open(path: str, name: str, size: int) -> int:
    # O_PATH opens no file, so it has no side effect on a device, a pipe or a terminal.
    seen = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status, through = os.fstat(seen), f"/proc/self/fd/{seen}"
        if (
            not stat.S_ISREG(status.st_mode)
            or (status.st_uid, status.st_nlink, status.st_size) != (os.geteuid(), 0, size)
            or str(Path(through).readlink()) != f"/memfd:{name} (deleted)"
        ):
            raise contract.ConnectorError("the file at the address is not the shared memory of this lease")
        descriptor = os.open(through, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(seen)
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        sealed = 0
    if sealed & _seals() != _seals():
        os.close(descriptor)
        raise contract.ConnectorError("the decode worker's shared memory is not sealed")
    return descriptor


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # here, for only Linux has them


def _name(lease: str, token: bytes) -> str:
    if not _LEASE.fullmatch(lease):
        raise contract.ConnectorError("the name of the lease cannot be part of a file's name")
    return f"fd_core-{lease}-{token.hex()}"


def _here() -> tuple[str, int]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, Path("/proc/self/ns/pid").stat().st_ino
