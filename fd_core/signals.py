"""The token matrix of a step: the only module that interprets -1 and -9.

A postprocessor writes the matrix on the device, once; `read` turns it into typed outcomes where it enters
the host, once. No other code compares a token id with a negative number.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fd_core.types import IntArray

__all__ = ["EMPTY_TOKEN_ID", "PREEMPTED_TOKEN_ID", "MalformedOutput", "Outcome", "Outcomes", "read"]

EMPTY_TOKEN_ID: Final = -1
"""No token: an idle slot, an unfinished prefill chunk, a rejected draft."""
PREEMPTED_TOKEN_ID: Final = -9
"""In column 0: acknowledges a preemption or an abort; all output of the slot for its gen has been delivered."""


class Outcome(enum.IntEnum):
    """Result of a step for one slot."""

    EMPTY = 0
    TOKENS = 1
    RELEASED = 2
    ERROR = 3


class MalformedOutput(ValueError):
    """A backend wrote a token matrix that the protocol does not allow."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Typed view of one token matrix, by slot."""

    kinds: npt.NDArray[np.uint8]
    """uint8[max_num_seqs] of `Outcome`."""
    counts: IntArray
    """int32[max_num_seqs], tokens delivered by the slot; they are in the first columns of `tokens`."""
    tokens: IntArray
    """int32[max_num_seqs, 1 + k]; only the first `counts[slot]` entries of a row have a meaning."""
    any_released: bool


def read(tokens: IntArray, errors: tuple[tuple[int, str], ...] = ()) -> Outcomes:
    """Turn the matrix int32[max_num_seqs, 1 + k] and (slot, message) of rows that failed into typed outcomes.

    A failed row delivers nothing, regardless of its content. A slot that was preempted or aborted stays RELEASED: its
    occupancy has ended, and the release must be processed.

    Raises `MalformedOutput` if a row breaks the protocol: tokens after an empty cell, anything else in the row of -9,
    -9 outside column 0, or another negative value.
    """
    is_token = tokens >= 0
    width = tokens.shape[1]
    if width == 1 and not np.count_nonzero(tokens < EMPTY_TOKEN_ID):  # the result of most steps of most engines
        kinds = is_token.view(np.uint8)[:, 0]  # EMPTY is 0 and TOKENS is 1
        counts = kinds.astype(np.int32)
        any_released = False
    else:
        released = tokens[:, 0] == PREEMPTED_TOKEN_ID
        # A row is well formed when its tokens are a prefix and everything else is -1, or it is -9 followed by -1.
        counts = is_token.sum(axis=1, dtype=np.int32)
        empty_cells = (tokens == EMPTY_TOKEN_ID).sum(axis=1, dtype=np.int32)
        complete = counts + empty_cells + released == width
        complete &= ~(is_token[:, 1:] & ~is_token[:, :-1]).any(axis=1)
        kinds = (counts > 0).view(np.uint8)
        kinds[released] = Outcome.RELEASED
        any_released = bool(released.any())
        if not complete.all():
            slot = int(np.flatnonzero(~complete)[0])
            raise MalformedOutput(f"slot {slot} carries {tokens[slot].tolist()}: not a valid row of the token matrix")
    for slot, _ in errors:
        counts[slot] = 0
        if kinds[slot] != Outcome.RELEASED:
            kinds[slot] = Outcome.ERROR
    return Outcomes(kinds, counts, tokens, any_released=any_released)
