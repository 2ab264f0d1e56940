"""Connector contract: moves sealed values from one process to another; the core does the rest.

The core seals each piece, bounds the number in flight, verifies received pieces and separates transfers by lease. A
connector handles opaque bytes, makes no decisions and may fail at any time: a failure ends the lease, and the decode
side computes the prompt itself. A connector has two ends:

    decode side:  inbox = connector.open_inbox(...)       inbox.address -> Open.address
    prefill side: outbox = connector.open_outbox(address, ...)
    prefill side: reference, frames = outbox.put(index, parts)      -> KVPiece.reference, and frames after the message
    decode side:  value = inbox.take(index, reference, frames)      -> checked, copied to the device, then
                  inbox.done(index, reference)                      -> before its `Credit` is given

A piece is in flight from its `put` until the credit after its `done`. Pieces are put in ascending order and taken in
any order. Each end is used from one thread, a connector object from several. No call takes longer than the `timeout` of
the settings; a call that fails raises only `ConnectorError`.

Three ways to carry values fit this contract. In band: the frames hold the values, an inbox has no memory. Through a
third party: a location that both sides reach. Into the inbox's own memory: `open_inbox` registers `window` buffers,
`address` describes how to write to them, `put` writes and `reference` names the buffer; if a write continues after
`put`, `take` waits for its completion.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from fd_core.errors import FdError
from fd_core.kv.stores.contract import KVStore

__all__ = [
    "MAX_ADDRESS_BYTES",
    "MAX_REFERENCE_BYTES",
    "Bytes",
    "Connector",
    "ConnectorError",
    "ConnectorSettings",
    "KVInbox",
    "KVOutbox",
    "PutResult",
    "flat_parts",
]

MAX_ADDRESS_BYTES: Final = 4096
MAX_REFERENCE_BYTES: Final = 1024

Bytes = bytes | bytearray | memoryview
"""A contiguous buffer of bytes."""


class ConnectorError(FdError):
    """A piece could not be moved. The message never holds a value, a prompt or a secret."""


class ConnectorSettings(NamedTuple):
    """Settings of every connector; a connector ignores those that it does not need."""

    make_store: Callable[[], KVStore] | None = None
    """Opens a separate store object for `--kv-store`, which the caller closes; None without `--kv-store`."""
    timeout: float = 1.0
    """Timeout of one call in seconds."""


class PutResult(NamedTuple):
    """Result of `KVOutbox.put`."""

    reference: bytes
    """Reference of the value for the other end; at most `MAX_REFERENCE_BYTES`."""
    frames: tuple[Bytes, ...] = ()
    """Buffers to be sent after the message, at most one more than `parts`; not modified until they were sent."""


class KVInbox(abc.ABC):
    """The decode side's end of one lease; it owns the memory that receives the pieces."""

    address: bytes
    """Write address for the prefill side; at most `MAX_ADDRESS_BYTES`. The address is not secret: it must not suffice
    to access the memory."""

    @abc.abstractmethod
    def take(self, index: int, reference: bytes, frames: Sequence[Bytes]) -> Bytes:
        """Return the sealed value of piece `index`; it stays valid until `done`.

        `reference` and `frames` are untrusted input from the other process: check them before any memory is accessed,
        and return at most the `value_bytes` that the inbox was opened with.
        """

    def done(self, index: int, reference: bytes) -> None:  # noqa: B027 - a no-op unless memory is reused
        """Mark the value as copied, so that its buffer may be reused; called once for each taken piece."""

    def close(self) -> None:  # noqa: B027 - a no-op unless resources are held
        """End the lease; later writes of the other side do no harm. Idempotent, never raises."""


class KVOutbox(abc.ABC):
    """The prefill side's end for one lease."""

    @abc.abstractmethod
    def put(self, index: int, parts: Sequence[Bytes]) -> PutResult:
        """Send the sealed value of piece `index`, the concatenation of `parts`, or store it for the inbox.

        Called in ascending order of `index`, with at most `window` pieces in flight, this one included. `parts` may
        change afterwards unless they are returned as `frames`. Raises `ConnectorError` for a value over `value_bytes`.
        """

    def close(self) -> None:  # noqa: B027 - a no-op unless resources are held
        """End the lease: the decode side needs no more pieces. Idempotent, never raises."""


class Connector(abc.ABC):
    """Factory of the ends of leases. An engine has one instance, and closes it after all its ends.

    The two ends of a lease belong to different instances.
    """

    name: str
    """Value of `--kv-connector` that selects it."""

    def __init__(self, settings: ConnectorSettings) -> None:
        """Store the settings without connecting. Raises `ConfigError` if a setting that the connector needs is
        missing."""
        self.settings = settings

    @abc.abstractmethod
    def open_inbox(self, lease: str, *, pieces: range, window: int, value_bytes: int) -> KVInbox:
        """Return the decode side's end for a lease with `window` pieces of up to `value_bytes` in flight at once.

        `pieces` are the indices that may arrive, at least `window` of them.
        """

    @abc.abstractmethod
    def open_outbox(self, lease: str, address: bytes, *, window: int, value_bytes: int) -> KVOutbox:
        """Return the prefill side's end. Raises `ConnectorError` if that inbox cannot be reached from this process.

        `address` is untrusted input from another process.
        """

    def close(self) -> None:  # noqa: B027 - a no-op unless resources are held
        """Release the resources that leases share. Idempotent, never raises."""


def flat_parts(parts: Sequence[Bytes], value_bytes: int) -> tuple[list[memoryview], int]:
    """Return the parts as uint8[n] views, and their total length. Raises `ConnectorError` over `value_bytes`."""
    flat = [memoryview(part).cast("B") for part in parts]
    length = sum(map(len, flat))
    if length > value_bytes:
        raise ConnectorError(f"a value of {length:,} bytes exceeds the agreed {value_bytes:,}")
    return flat, length
