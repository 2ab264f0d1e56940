"""What clients want: conversations of one turn or several, whose texts are made from numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.types import IntArray

_FIRST_TOKEN = 16
"""Tokens below are never in a text: the end of an answer is one of them."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STATES = np.arange(1, 4097, dtype=np.uint64) * _GOLDEN
"""What the first places add to a seed."""
_STIR = np.uint64(0xBF58476D1CE4E5B9)
_STIR_AGAIN = np.uint64(0x94D049BB133111EB)


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
    """The requests of one client, one after the other.

    A request that fails or is left ends them, up to the next that begins anew.
    """

    name: str
    """Unique in a workload; also what a router is told as the session."""
    at: float
    """Seconds from the begin of the run to the first request."""
    turns: Sequence[UserTurn]
    """Some are made only when they are asked for, in this order."""
    tenant: str = ""
    priority: int = 0


def tokens_of(piece: Piece, vocab_size: int) -> IntArray:
    """Return the tokens of a piece, int32[piece.tokens], each in [16, vocab_size)."""
    return tokens_from(piece, 0, piece.tokens, vocab_size)


def tokens_from(piece: Piece, first: int, count: int, vocab_size: int) -> IntArray:
    """Return `count` tokens of a piece from place `first` on, int32[count], as if it were long enough."""
    if first + count <= len(_STATES):
        states = _STATES[first : first + count]
    else:
        states = np.arange(first + 1, first + count + 1, dtype=np.uint64) * _GOLDEN
    return to_tokens(_mixed(states + np.uint64(piece.seed & (2**64 - 1))), vocab_size)


def stirred(seeds: npt.NDArray[np.uint64], places: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return a number for each seed and place, as SplitMix64 stirs its states (Steele, Lea, Flood 2014)."""
    return _mixed(seeds + (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def to_tokens(numbers: npt.NDArray[np.uint64], vocab_size: int) -> IntArray:
    """Return a token of a text for each number."""
    spread = np.uint64(vocab_size - _FIRST_TOKEN)
    return (_FIRST_TOKEN + ((numbers >> np.uint64(33)) * spread >> np.uint64(31))).astype(np.int32)


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the states stirred, in their own place: whoever calls needs them no more."""
    for shift, factor in ((30, _STIR), (27, _STIR_AGAIN)):
        state ^= state >> np.uint64(shift)
        state *= factor
    state ^= state >> np.uint64(31)
    return state
