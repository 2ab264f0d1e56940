"""What a connector does: moves sealed values from one process to another. Everything else is the core's.

The core seals each piece, bounds how many are on their way, checks what arrives and tells both sides apart by lease. A
connector sees opaque bytes, decides nothing and may fail at any time: whatever it does wrong ends that lease and the
decode side computes the prompt itself. Two ends belong together:

    decode side:  inbox = connector.open_inbox(...)       inbox.address -> Open.address
    prefill side: outbox = connector.open_outbox(address, ...)
    prefill side: reference, frames = outbox.put(index, parts)      -> Piece.reference, and frames behind the message
    decode side:  value = inbox.take(index, reference, frames)      -> checked, copied to the device, then
                  inbox.done(index, reference)                      -> before its `Credit` is given

Each end is used from one thread, a connector object from several. No call takes longer than the `timeout` of the
settings; a call that fails raises `ConnectorError`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

from fd_core.errors import FdError

__all__ = ["Bytes", "Connector", "ConnectorError", "ConnectorSettings", "Inbox", "Outbox", "Put"]

Bytes = bytes | bytearray | memoryview
"""A contiguous buffer of bytes."""


class ConnectorError(FdError):
    """A piece could not be moved. Never carries a value, a prompt or a secret."""


class ConnectorSettings(NamedTuple):
    """What every connector is made from; one that needs nothing of it ignores it."""

    kv_store: str | None = None
    """`--kv-store`, for connectors that go through a store."""
    timeout: float = 1.0
    """Seconds that one call may take."""


class Put(NamedTuple):
    """What `Outbox.put` did with a value."""

    reference: bytes
    """Tells the other end where it is; at most 1 KiB."""
    frames: tuple[Bytes, ...] = ()
    """Buffers to be sent behind the message; unchanged until they were sent."""


class Inbox(abc.ABC):
    """The decode side's end for one lease; it owns the memory that pieces arrive in."""

    address: bytes
    """Told to the prefill side; holds no secret that would let others write to it, or is useless to them."""

    @abc.abstractmethod
    def take(self, index: int, reference: bytes, frames: Sequence[Bytes]) -> Bytes:
        """Return the sealed value of piece `index`; it stays valid until `done`.

        `reference` and `frames` come from the other side and may be anything: they are checked before any memory is
        touched, and a value is never longer than the `value_bytes` that the inbox was opened with.
        """

    def done(self, index: int, reference: bytes) -> None:  # noqa: B027 - nothing to do where memory is not reused
        """The value was copied; its place may be used again."""

    def close(self) -> None:  # noqa: B027 - nothing to do where nothing is held
        """The lease is over; whatever is still written to it harms nobody. Idempotent, never raises."""


class Outbox(abc.ABC):
    """The prefill side's end for one lease."""

    @abc.abstractmethod
    def put(self, index: int, parts: Sequence[Bytes]) -> Put:
        """Send the sealed value of piece `index`, the concatenation of `parts`, or leave it where it is found.

        Called with at most `window` pieces on their way; a place is free again when credit for its piece was given.
        """

    def close(self) -> None:  # noqa: B027 - nothing to do where nothing is held
        """The lease is over. Idempotent, never raises."""


class Connector(abc.ABC):
    """Makes the ends of leases; one object for each engine, closed after all its ends."""

    name: str
    """What users write behind `--kv-connector`."""

    def __init__(self, settings: ConnectorSettings) -> None:
        """Reach for nothing yet. Raises `ConfigError` if the settings lack what it needs."""
        self.settings = settings

    @abc.abstractmethod
    def open_inbox(self, lease: str, *, window: int, value_bytes: int) -> Inbox:
        """Return the decode side's end for a lease with `window` pieces of up to `value_bytes` on their way at once."""

    @abc.abstractmethod
    def open_outbox(self, lease: str, address: bytes, *, window: int, value_bytes: int) -> Outbox:
        """Return the prefill side's end. `address` comes from another process and may be anything."""

    def close(self) -> None:  # noqa: B027 - nothing to do where nothing is held
        """Give up what is shared by leases. Idempotent, never raises."""
