"""Values and whole transfers that the cases of the connector kit share."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence

from hypothesis import strategies as st

from fd_core.disagg.connectors.contract import MAX_REFERENCE_BYTES, Bytes, KVInbox, KVOutbox, PutResult

VALUE_BYTES = 720 * 1024 + 80
"""Size of a real value: the sealed KV of a block."""
SLACK = 1.5
"""Seconds by which a call may be late on a busy machine."""


def new_lease() -> str:
    """Return a name for a lease, as the core makes them."""
    return secrets.token_hex(16)


def value_of(index: int, length: int) -> bytes:
    """Return the value of `length` bytes that belongs to an index; each index has another."""
    return random.Random(index * 1_000_003 + length).randbytes(length)  # noqa: S311 -- must be the same each time


def put(outbox: KVOutbox, index: int, value: bytes) -> PutResult:
    """Put a value in two parts, as the core does, and check what comes back."""
    done = outbox.put(index, (value[:80], value[80:]))
    assert isinstance(done.reference, bytes)
    assert len(done.reference) <= MAX_REFERENCE_BYTES
    return PutResult(done.reference, tuple(bytes(frame) for frame in done.frames))


def carry(
    inbox: KVInbox, outbox: KVOutbox, values: Sequence[bytes], first: int, window: int, chance: random.Random
) -> None:
    """Carry values in a random order that the window allows, and compare what arrives, when taken and when done."""
    left = dict(enumerate(values, first))
    unsent, announced, taken = list(left), dict[int, PutResult](), dict[int, Bytes]()
    while left:
        moves = [("take", index) for index in announced if index not in taken]
        moves += [("done", index) for index in taken]
        if unsent and len(announced) < window:
            moves.append(("put", unsent[0]))
        move, index = chance.choice(moves)
        if move == "put":
            announced[index] = put(outbox, unsent.pop(0), left[index])
        elif move == "take":
            taken[index] = inbox.take(index, *announced[index])
            assert bytes(taken[index]) == left[index], f"piece {index} did not arrive as it was sent"
        else:
            assert bytes(taken.pop(index)) == left.pop(index), f"piece {index} changed before it was done"
            inbox.done(index, announced.pop(index).reference)


def garbage(truth: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for bytes that a stranger may send in place of `truth`, random or similar to it."""

    def bent(change: tuple[int, int, bytes]) -> bytes:
        start, length, text = change
        return truth[:start] + text + truth[start + length :]

    changes = st.tuples(st.integers(0, len(truth)), st.integers(0, 8), st.binary(max_size=8))
    return st.one_of(st.binary(max_size=80), st.just(b"x" * 5000), changes.map(bent)).filter(lambda it: it != truth)
