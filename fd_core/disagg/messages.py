"""Messages between the two sides of a lease; encoded with msgspec and sealed, see `wire`.

    decode: Open ------------> prefill        the job, compatibility, the target of the KV
    decode <------- Accept or Refuse
    decode <------- KVPiece ... (payload by the connector)      Credit ------> prefill, cumulative
    decode <------- Commit                    Confirm -----> prefill
    either: Alive (heartbeat), AbortLease (the lease is over)

Every message names its lease. Each may be lost, repeated or reordered: messages are idempotent, and a lease that misses
one expires. `lease.validate_open` checks the limits of `Open`; a rejection contains the reason as text.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fd_core.disagg.connectors.contract import MAX_REFERENCE_BYTES
from fd_core.disagg.kv_compatibility import KVCompatibility
from fd_core.types import PrefillJob

MAX_NUMBER: Final = 2**31 - 1
MAX_TEXT: Final = 1024
"""Characters of a reason, a salt, a tenant or a field of `KVCompatibility`."""

_LeaseName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The decode side leases blocks to the prefill side and requests the KV of a prompt."""

    job: PrefillJob
    """The job to compute; its `lease` is a unique name that is never reused."""
    compatibility: KVCompatibility
    window: int
    """Maximum number of pieces in flight without a `Credit`, at least 1."""
    idle_timeout: float = msgspec.field(name="silence")
    """Seconds without a message from the other side after which the lease is over."""
    connector: str
    address: bytes
    """Address of the decode side's end in the format of that connector, at most a few kilobytes."""
    request_id: str = ""
    """The decode side's name for the request, for the logs of both."""

    @property
    def lease(self) -> str:
        """Name of the lease."""
        return self.job.lease


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """The prefill side accepts the job."""

    lease: _LeaseName


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """The prefill side rejects the job; the lease is over."""

    lease: _LeaseName
    reason: _Reason
    """Human-readable; never holds a prompt."""


class KVPiece(msgspec.Struct, frozen=True, tag="piece"):
    """The KV in one block, sealed; the connector carries the payload."""

    lease: _LeaseName
    index: _Number
    """Index of the block, see `requested_pieces`."""
    digest: _Digest
    """Digest of the sealed value, as `wire` computes it."""
    reference: Annotated[bytes, msgspec.Meta(max_length=MAX_REFERENCE_BYTES)] = b""
    """Reference by which the connector finds the value; empty if the value is a frame after this message."""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """All pieces were sent."""

    lease: _LeaseName
    tokens: Annotated[int, msgspec.Meta(gt=0, le=MAX_NUMBER)]
    digest: _Digest
    """Digest over the digests of all pieces in the order of their index."""
    cached: _Number = 0
    """Number of tokens found in the prefix cache of the prefill side."""


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """Cumulative number of pieces copied; the prefill side may send `window` more."""

    lease: _LeaseName
    taken: _Number


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """The decode side has all pieces; the lease is over."""

    lease: _LeaseName


class Heartbeat(msgspec.Struct, frozen=True, tag="alive"):
    """Heartbeat: the lease is still active on the sender."""

    lease: _LeaseName


class AbortLease(msgspec.Struct, frozen=True, tag="abort"):
    """The lease is over on the sender, or unknown there."""

    lease: _LeaseName
    reason: _Reason = ""
    """Human-readable; never holds a prompt."""


FromDecode = Open | Credit | Confirm | Heartbeat | AbortLease
FromPrefill = Accept | Refuse | KVPiece | Commit | Heartbeat | AbortLease
