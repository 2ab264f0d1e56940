"""What both sides of a lease share: what is to be done for it, its clock, and what may be asked; pure.

Either side is a machine, `DecodeLease` or `PrefillLease`: what happened goes in with the time, what is to be done comes
out as a list of actions. Nothing the other side says raises, and whatever arrives after the end changes nothing. So
that a lost message costs no more than time, each side repeats what the other may have missed whenever it was quiet for
a while: the decode side `Open` until it hears something, and then `Credit`; the prefill side `Commit`. A lost piece is
not repeated, as its block may be in use again: the lease expires.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from fd_core.disagg.messages import FromDecode, FromPrefill, Open, Piece
from fd_core.kv.effects import Outcome

__all__ = [
    "TOKEN_BYTES",
    "Action",
    "Clock",
    "DecodeEnd",
    "End",
    "PrefillEnd",
    "Put",
    "Say",
    "Take",
    "commit_digest",
    "flaw",
    "wanted",
]

End = Literal["confirmed", "refused", "aborted", "gave_up", "failed", "expired"]
"""What became of a lease for the prefill side: `aborted` is by the decode side, `gave_up` by its own engine."""

_WORDS_IN_SILENCE: Final = 4
"""So many times a side speaks before the other would take it for dead."""
_DIGEST_BYTES: Final = 16
TOKEN_BYTES: Final = 4
_NAME: Final = re.compile("[0-9a-f]{32}")
_LEAST_SILENCE: Final = 0.05
_MOST_SILENCE: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message to the other side."""

    message: FromDecode | FromPrefill


@dataclass(frozen=True, slots=True)
class Take:
    """Check a piece and copy it to its block, then call `DecodeLease.copied` or `spoiled`."""

    piece: Piece


@dataclass(frozen=True, slots=True)
class Put:
    """Read a block, seal it and hand it to the connector, then call `PrefillLease.put` or `failed`."""

    index: int


@dataclass(frozen=True, slots=True)
class DecodeEnd:
    """The lease is over: no block of it may be written from here on."""

    outcome: Outcome
    reason: str
    """For people; empty if all went well."""


@dataclass(frozen=True, slots=True)
class PrefillEnd:
    """The lease is over: nothing of it needs to be sent any more."""

    end: End
    reason: str
    abort: bool
    """Whether the request that computes the prompt is to be aborted, if there is one yet."""


Action = Say | Take | Put | DecodeEnd | PrefillEnd


def commit_digest(digests: Mapping[int, bytes]) -> bytes:
    """Return what a `Commit` says of pieces: BLAKE2b-16 over index and digest of each, in the order of the index."""
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for index in sorted(digests):
        total.update(index.to_bytes(4, "little") + digests[index])
    return total.digest()


def wanted(opening: Open) -> range:
    """Return the indices of the pieces that are asked for: those of all blocks but the leading `held_blocks`."""
    return range(opening.job.held_blocks, -(-opening.job.num_tokens // opening.terms.block_size))


def flaw(opening: Open) -> str | None:
    """Say for people why no lease can be opened like that, None if one can. Its terms are this side's own."""
    if not _NAME.fullmatch(opening.lease):
        return "a lease has to be named by 32 hexadecimal digits"
    if len(opening.job.tokens) % TOKEN_BYTES or opening.job.held_blocks < 0 or not wanted(opening):
        return "no KV is asked for"
    if opening.window < 1:
        return "the window has to hold at least one piece"
    if not _LEAST_SILENCE <= opening.silence <= _MOST_SILENCE:
        return f"the silence has to be {_LEAST_SILENCE:g} to {_MOST_SILENCE:g} seconds"
    return None


class Clock:
    """How long a side has been heard and has been quiet, in seconds."""

    def __init__(self, silence: float, longest: float, now: float) -> None:
        self._silence = silence
        self._end = now + longest
        self._deaf = now + silence
        self._word = now + silence / _WORDS_IN_SILENCE

    @property
    def next(self) -> float:
        """When `late` or `quiet` may change at the latest."""
        return min(self._end, self._deaf, self._word)

    def heard(self, now: float) -> None:
        """The other side said something."""
        self._deaf = now + self._silence

    def said(self, now: float) -> None:
        """This side said something."""
        self._word = now + self._silence / _WORDS_IN_SILENCE

    def postpone(self, now: float) -> None:
        """Look again soon whether a word may be said."""
        self._word = now + self._silence / _WORDS_IN_SILENCE**2

    def late(self, now: float) -> str | None:
        """Say why the lease has expired, None if it has not."""
        if now >= self._end:
            return "the lease took longer than any may"
        return "the other side is silent" if now >= self._deaf else None

    def quiet(self, now: float) -> bool:
        """Whether this side should say something again."""
        return now >= self._word
