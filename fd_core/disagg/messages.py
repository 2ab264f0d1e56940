"""What the two sides of a lease say to each other; encoded with msgspec and sealed, see `wire`.

    decode: Open ------------> prefill        prompt, terms, where the KV goes
    decode <------- Accept or Refuse
    decode <------- Piece ... (payload by the connector)        Credit ------> prefill, cumulative
    decode <------- Commit                    Confirm -----> prefill
    either: Alive (nothing new, still here), Abort (it is over)

Every message names its lease. All of them may be lost, repeated or reordered without harm: repeated ones change
nothing, and a lease that misses one expires.
"""

from __future__ import annotations

import msgspec

from fd_core.disagg.terms import Terms
from fd_core.types import PrefillJob

__all__ = [
    "Abort",
    "Accept",
    "Alive",
    "Commit",
    "Confirm",
    "Credit",
    "FromDecode",
    "FromPrefill",
    "Open",
    "Piece",
    "Refuse",
]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The decode side holds blocks for a prompt and leases them to the prefill side."""

    job: PrefillJob
    """What is to be computed, under a name for the lease that is never given twice."""
    terms: Terms
    window: int
    """Pieces that may be on their way without a `Credit`, at least 1."""
    silence: float
    """Seconds without a word from the other side after which a lease is over."""
    connector: str
    """Name of the connector that carries the pieces."""
    address: bytes
    """What that connector needs to reach the decode side's end; its own format, at most a few kilobytes."""

    @property
    def lease(self) -> str:
        """Name of the lease."""
        return self.job.lease


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """The prefill side will compute it."""

    lease: str


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """The prefill side will not; the lease is over."""

    lease: str
    reason: str
    """For people; never holds a prompt."""


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """All layers of one block, sealed; the payload itself travels as the connector does it."""

    lease: str
    index: int
    """Place of the block among those of the prompt, at least `PrefillJob.held_blocks`."""
    digest: bytes
    """Of the sealed value, as `wire` computes it."""
    reference: bytes = b""
    """Where the connector left the value; empty if it is a frame behind this message."""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """All pieces were sent."""

    lease: str
    tokens: int
    """Leading tokens whose KV the pieces hold: all that were wanted."""
    digest: bytes
    """Over the digests of all pieces in the order of their index."""
    cached: int = 0
    """How many of the tokens the prefill side had in its prefix cache."""


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """So many pieces have been taken in all; the prefill side may send `window` more than that."""

    lease: str
    taken: int


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """The decode side has everything; the lease is over."""

    lease: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Nothing new, but the lease goes on as far as this side is concerned."""

    lease: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The lease is over for this side, or it knows none of that name."""

    lease: str
    reason: str = ""


FromDecode = Open | Credit | Confirm | Alive | Abort
FromPrefill = Accept | Refuse | Piece | Commit | Alive | Abort
