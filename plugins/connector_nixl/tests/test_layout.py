"""Layout of the memory of a lease."""

from __future__ import annotations

import itertools

import pytest
from fd_core.disagg.connectors.contract import ConnectorError
from hypothesis import given
from hypothesis import strategies as st

from fd_connector_nixl.layout import TOKEN_BYTES, Layout, Notice, Reference

LAYOUTS = st.builds(Layout, st.integers(1, 64), st.integers(0, 1 << 20))
NUMBERS = st.integers(0, 2**32 - 1)
REFERENCES = st.builds(Reference, NUMBERS, NUMBERS, NUMBERS)
TOKEN = bytes(range(TOKEN_BYTES))


@given(LAYOUTS)
def test_nothing_overlaps_and_everything_fits(layout: Layout) -> None:
    room = max(layout.value_bytes, 1)  # a value of no bytes is written as one
    spots = [(0, layout.header_bytes)] + [(layout.start(slot), room) for slot in range(layout.window)]
    for (start, length), (following, _) in itertools.pairwise(spots):
        assert start + length <= following
    assert sum(spots[-1]) <= layout.size
    assert all(start % 64 == 0 for start, _ in spots)


def test_counts_round_trip() -> None:
    layout = Layout(5, 100)
    memory = memoryview(bytearray(b"\xff" * layout.size))
    layout.write_header(memory, TOKEN)
    assert layout.read_header(memory) == (TOKEN, [0] * 5)
    layout.write_count(memory, 3, 2**32 - 1)
    layout.write_count(memory, 0, 7)
    assert layout.read_header(memory) == (TOKEN, [7, 0, 0, 2**32 - 1, 0])


@given(REFERENCES, st.integers(-(2**63), 2**63 - 1))
def test_notices_round_trip(reference: Reference, piece: int) -> None:
    notice = Notice(TOKEN, piece, reference)
    assert Reference.decode(reference.encode()) == reference
    assert Notice.decode(notice.encode()) == notice


def test_end_marker_is_not_a_piece() -> None:
    last = Notice.decode(Notice.of_the_end(TOKEN).encode())
    assert last is not None
    assert last.ends
    assert not Notice(TOKEN, 0, Reference(0, 1, 0)).ends


@given(st.binary(max_size=100))
def test_garbage_is_rejected_as_reference_and_notice(garbage: bytes) -> None:
    if len(garbage) != len(Reference(0, 0, 0).encode()):
        with pytest.raises(ConnectorError):
            Reference.decode(garbage)
    if len(garbage) != len(Notice.of_the_end(TOKEN).encode()):
        assert Notice.decode(garbage) is None
