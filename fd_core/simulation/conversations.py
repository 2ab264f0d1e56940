"""What clients want: conversations of one turn or several, whose texts are made from numbers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from fd_core.types import IntArray

__all__ = ["Conversation", "Piece", "UserTurn", "tokens_of"]

_FIRST_TOKEN = 16
"""Tokens below are never in a text: the end of an answer is one of them."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_STIR = np.uint64(0xBF58476D1CE4E5B9)


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Some tokens of a text. Equal pieces have equal tokens, so texts that begin with equal pieces share a prefix."""

    seed: int
    """64 bits that decide the tokens."""
    tokens: int
    """How many there are."""


class UserTurn(msgspec.Struct, frozen=True, gc=False):
    """A request: what the client adds to the conversation, and how long the model's answer is."""

    adds: tuple[Piece, ...]
    """Behind everything that was said before, answers included."""
    answer: Piece
    """The model ends its answer behind these tokens, unless `max_tokens` ends it before."""
    think: float = 0.0
    """Seconds from the end of the answer before to this request; of the first turn nothing, see `Conversation.at`."""
    max_tokens: int | None = None
    """What the client asks for at most; None leaves it to the model's length limit."""
    patience: float | None = None
    """Seconds after which a client that has not got the whole answer leaves; None stays."""
    fresh: bool = False
    """Forget what was said before: the prompt is `adds` alone. Users of a closed loop begin again so."""


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """The requests of one client, one after the other. A request that fails ends its conversation."""

    name: str
    """Unique in a workload; also what a router is told as the session."""
    at: float
    """Seconds from the begin of the run to the first request."""
    turns: Sequence[UserTurn]
    """Some are made only when they are asked for, in this order."""
    tenant: str = ""
    priority: int = 0


def tokens_of(piece: Piece, vocab_size: int) -> IntArray:
    """Return the tokens of a piece, int32[piece.tokens], each in [16, vocab_size). Stirred as in SplitMix64."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, piece.tokens + 1, dtype=np.uint64) + np.uint64(piece.seed & (2**64 - 1))) * _MIX
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _STIR
    return (_FIRST_TOKEN + (mixed >> np.uint64(33)) % np.uint64(vocab_size - _FIRST_TOKEN)).astype(np.int32)
