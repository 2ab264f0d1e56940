"""Code shared by both sides of a lease: the actions of its state machines, its clock and its limits; pure.

Each side is a state machine, `DecodeLease` or `PrefillLease`, that maps an event, with its time if needed, to a list of
actions. No message of the peer raises an exception, and events after the end of the lease are ignored. A lost message
only costs time, because an idle side repeats its last state: the decode side repeats `Open` until it receives a
message, and then `Credit`; the prefill side repeats `Commit`. A lost piece is not repeated, because its block may be
reused: the lease expires.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from fd_core.config.layer_groups import MAX_GROUPS
from fd_core.disagg.connectors.contract import MAX_ADDRESS_BYTES
from fd_core.disagg.messages import MAX_NUMBER, MAX_TEXT, FromDecode, FromPrefill, KVPiece, Open
from fd_core.types import MAX_JOB_PIXELS, PrefillOutcome

End = Literal["confirmed", "refused", "aborted", "gave_up", "failed", "expired"]
"""Outcome of a lease for the prefill side: `aborted` by the decode side, `gave_up` by the engine of the prefill
side."""

LEASE_NAME: Final = re.compile("[0-9a-f]{32}")
TOKEN_BYTES: Final = 4
MAX_WINDOW: Final = 256
_DIGEST_BYTES: Final = 16
_MIN_IDLE_TIMEOUT: Final = 0.05
_MAX_IDLE_TIMEOUT: Final = 3600.0
_HEARTBEATS_PER_TIMEOUT: Final = 4
"""Messages that a side sends within the timeout of its peer."""


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to the other side."""

    message: FromDecode | FromPrefill


@dataclass(frozen=True, slots=True)
class TakePiece:
    """Check a piece and copy it to its block, then call `DecodeLease.copied` or `spoiled`."""

    piece: KVPiece


@dataclass(frozen=True, slots=True)
class SendPiece:
    """Read a block, seal it and hand it to the connector, then call `PrefillLease.put` or `failed`."""

    index: int


@dataclass(frozen=True, slots=True)
class DecodeEnd:
    """The lease is over: none of its blocks may be written any more."""

    outcome: PrefillOutcome
    reason: str
    """Human-readable; empty if the KV was transferred."""


@dataclass(frozen=True, slots=True)
class PrefillEnd:
    """The lease is over: none of its blocks needs to be sent any more."""

    end: End
    reason: str
    abort: bool
    """True if the request that computes the job, if any, must be aborted."""


Action = SendMessage | TakePiece | SendPiece | DecodeEnd | PrefillEnd


def commit_digest(digests: Mapping[int, bytes]) -> bytes:
    """Return the digest of a `Commit` over pieces: BLAKE2b-16 over index and digest of each, in index order."""
    total = hashlib.blake2b(digest_size=16)
    for index in sorted(digests):
        total.update(index.to_bytes(4, "little") + digests[index])
    return total.digest()


def requested_pieces(opening: Open) -> range:
    """Return the indices of the requested pieces: those of all blocks but the leading `held_blocks`.

    Blocks are counted in the order of `LayerGroups.order`.
    """
    held, tokens = opening.job.held_blocks, opening.job.num_tokens
    groups, size = opening.compatibility.groups, opening.compatibility.block_size
    sliding = groups.sliding * len(groups.read_after(held, tokens, size))
    return range(held, held + groups.whole * (-(-tokens // size) - held) + sliding)


def validate_open(opening: Open, max_tokens: int = MAX_NUMBER) -> str | None:
    """Return the reason why `Open` is invalid, as text; None if it is valid."""
    job, compatibility = opening.job, opening.compatibility
    fields = msgspec.structs.asdict(compatibility)
    latent, ranks = fields.pop("latent"), fields.pop("state_ranks")
    numbers = [value for value in fields.values() if isinstance(value, int)]
    if not LEASE_NAME.fullmatch(job.lease):
        return "the lease id is not 32 hexadecimal digits"
    if not (
        0 <= latent < compatibility.head_dim
        and 0 <= ranks <= MAX_NUMBER
        and all(0 < number <= MAX_NUMBER for number in numbers)
    ):
        return "a field of the KV description is out of range"
    groups = compatibility.groups
    if not 1 <= groups.count <= MAX_GROUPS or min(msgspec.structs.astuple(groups)) < 0 or groups.window > MAX_NUMBER:
        return f"the groups of layers are not 1 to {MAX_GROUPS}"
    if len(job.tokens) % TOKEN_BYTES or not 0 <= job.held_blocks <= MAX_NUMBER or not requested_pieces(opening):
        return "the job requests no KV"
    if (tokens := job.num_tokens) > max_tokens:
        return f"the prompt has {tokens} tokens, which exceeds the prefill worker's {max_tokens}"
    if sum(len(image.pixels) for image in job.images) > MAX_JOB_PIXELS:
        return f"the images have more than {MAX_JOB_PIXELS} bytes of pixels"
    if any(len(image.digest) != _DIGEST_BYTES or not 0 < image.num_tokens <= tokens for image in job.images):
        return "an image has no digest of 16 bytes, or no tokens"
    if job.token_ids.min() < 0:
        return "a token is negative"
    if abs(job.priority) > MAX_NUMBER:
        return "the priority is out of range"
    if not 1 <= opening.window <= MAX_WINDOW:
        return f"the window is not 1 to {MAX_WINDOW} pieces"
    if not _MIN_IDLE_TIMEOUT <= opening.idle_timeout <= _MAX_IDLE_TIMEOUT:
        return f"the idle timeout is not {_MIN_IDLE_TIMEOUT:g} to {_MAX_IDLE_TIMEOUT:g} seconds"
    if not 1 <= len(opening.connector) <= 64 or len(opening.address) > MAX_ADDRESS_BYTES:
        return "the connector's name or address is too long"
    digests = (compatibility.model, compatibility.weights, compatibility.dtype)
    texts = (job.cache_salt, job.tenant, job.traceparent, opening.request_id, *digests)
    if max(map(len, texts)) > MAX_TEXT:
        return f"salt, tenant, trace and request id may have at most {MAX_TEXT} characters"
    return None


class Clock:
    """Times since a side last received from its peer and last sent to it, in seconds."""

    def __init__(self, idle_timeout: float, longest: float, now: float) -> None:
        self._idle_timeout = idle_timeout
        self._end = now + longest
        self._receive_deadline = now + idle_timeout
        self._heartbeat_at = now + idle_timeout / _HEARTBEATS_PER_TIMEOUT

    @property
    def next(self) -> float:
        """Return the next time at which `expiry_reason` or `heartbeat_due` may change."""
        return min(self._end, self._receive_deadline, self._heartbeat_at)

    def received(self, now: float) -> None:
        """Record a message from the other side."""
        self._receive_deadline = now + self._idle_timeout

    def sent(self, now: float) -> None:
        """Record a message of this side."""
        self._heartbeat_at = now + self._idle_timeout / _HEARTBEATS_PER_TIMEOUT

    def postpone(self, now: float) -> None:
        """Check again soon if a message may be sent."""
        self._heartbeat_at = now + self._idle_timeout / _HEARTBEATS_PER_TIMEOUT**2

    def expiry_reason(self, now: float) -> str | None:
        """Return the reason why the lease has expired, None if it has not."""
        if now >= self._end:
            return "the lease exceeded its time limit"
        return "the peer sent no message within the timeout" if now >= self._receive_deadline else None

    def heartbeat_due(self, now: float) -> bool:
        """Return True if this side should send a message."""
        return now >= self._heartbeat_at
