"""What a connector does: moves sealed values from one process to another. Everything else is the core's.

The core seals each piece, bounds how many are on their way, checks what arrives and tells both sides apart by lease. A
connector sees opaque bytes, decides nothing and may fail at any time: whatever it does wrong ends that lease and the
decode side computes the prompt itself. Two ends belong together:

    decode side:  inbox = connector.open_inbox(...)       inbox.address -> Open.address
    prefill side: outbox = connector.open_outbox(address, ...)
    prefill side: reference, frames = outbox.put(index, parts)      -> Piece.reference, and frames behind the message
    decode side:  value = inbox.take(index, reference, frames)      -> checked, copied to the device, then
                  inbox.done(index, reference)                      -> before its `Credit` is given

A piece is on its way from its `put` until the credit that its `done` allows. Pieces are put in ascending order and
taken in any. Each end is used from one thread, a connector object from several. No call takes longer than the
`timeout` of the settings; a call that fails raises `ConnectorError` and nothing else.

Three ways to carry values fit this. In band: the frames hold them, an inbox has no memory. Through a third party: a
place that both sides reach. Into the inbox's own memory: `open_inbox` registers `window` places, `address` says how to
write to them, `put` writes and `reference` names the place; if a write goes on after `put`, `take` waits for its end.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from fd_core.errors import FdError

if TYPE_CHECKING:
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
]

MAX_ADDRESS_BYTES: Final = 4096
MAX_REFERENCE_BYTES: Final = 1024

Bytes = bytes | bytearray | memoryview
"""A contiguous buffer of bytes."""


class ConnectorError(FdError):
    """A piece could not be moved. Never carries a value, a prompt or a secret."""


class ConnectorSettings(NamedTuple):
    """What every connector is made from; one that needs nothing of it ignores it."""

    make_store: Callable[[], KVStore] | None = None
    """Makes another store object for `--kv-store`, None if that was not given; whoever calls it closes the store."""
    timeout: float = 1.0
    """Seconds that one call may take."""


class PutResult(NamedTuple):
    """What `KVOutbox.put` did with a value."""

    reference: bytes
    """Tells the other end where it is; at most `MAX_REFERENCE_BYTES`."""
    frames: tuple[Bytes, ...] = ()
    """Buffers to be sent behind the message; unchanged until they were sent."""


class KVInbox(abc.ABC):
    """The decode side's end for one lease; it owns the memory that pieces arrive in."""

    address: bytes
    """Told to the prefill side, at most `MAX_ADDRESS_BYTES`. No secret: reaching the memory takes more than that."""

    @abc.abstractmethod
    def take(self, index: int, reference: bytes, frames: Sequence[Bytes]) -> Bytes:
        """Return the sealed value of piece `index`; it stays valid until `done`.

        `reference` and `frames` come from the other side and may be anything: they are checked before any memory is
        touched, and a value is never longer than the `value_bytes` that the inbox was opened with.
        """

    def done(self, index: int, reference: bytes) -> None:  # noqa: B027 - nothing to do where memory is not reused
        """The value was copied; its place may be used again. Called once for each piece that was taken."""

    def close(self) -> None:  # noqa: B027 - nothing to do where nothing is held
        """The lease is over; whatever is still written to it harms nobody. Idempotent, never raises."""


class KVOutbox(abc.ABC):
    """The prefill side's end for one lease."""

    @abc.abstractmethod
    def put(self, index: int, parts: Sequence[Bytes]) -> PutResult:
        """Send the sealed value of piece `index`, the concatenation of `parts`, or leave it where it is found.

        Called with at most `window` pieces on their way, this one included, in ascending order of `index`. `parts` may
        change afterwards unless they come back as `frames`. A value longer than `value_bytes` is refused.
        """

    def close(self) -> None:  # noqa: B027 - nothing to do where nothing is held
        """The lease is over: the decode side wants nothing more of it. Idempotent, never raises."""


class Connector(abc.ABC):
    """Makes the ends of leases; one object for each engine, closed after all its ends."""

    name: str
    """What users write behind `--kv-connector`."""

    def __init__(self, settings: ConnectorSettings) -> None:
        """Reach for nothing yet. Raises `ConfigError` if the settings lack what it needs."""
        self.settings = settings

    @abc.abstractmethod
    def open_inbox(self, lease: str, *, pieces: range, window: int, value_bytes: int) -> KVInbox:
        """Return the decode side's end for a lease with `window` pieces of up to `value_bytes` on their way at once.

        `pieces`: the indices that may come, not fewer than `window`.
        """

    @abc.abstractmethod
    def open_outbox(self, lease: str, address: bytes, *, window: int, value_bytes: int) -> KVOutbox:
        """Return the prefill side's end; `ConnectorError` if that inbox cannot be reached from here.

        `address` comes from another process and may be anything.
        """

    def close(self) -> None:  # noqa: B027 - nothing to do where nothing is held
        """Give up what is shared by leases. Idempotent, never raises."""
