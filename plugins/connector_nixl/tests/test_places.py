"""Accounting of both sides, in every order of events."""

from __future__ import annotations

from contextlib import suppress

import pytest
from fd_core.disagg.connectors.contract import ConnectorError
from hypothesis import given
from hypothesis import strategies as st

from fd_connector_nixl.layout import ReceiverSlots, Reference, SenderSlots

LENGTH = 100


@given(st.data(), st.integers(1, 5), st.integers(1, 20))
def test_slot_is_not_overwritten_while_it_holds_a_piece(data: st.DataObject, window: int, count: int) -> None:
    pieces = range(3, 3 + count)
    departures, arrivals, freed = SenderSlots(window), ReceiverSlots(pieces, window, LENGTH), [0] * window
    unsent, flying, there = list(pieces), dict[int, Reference](), dict[int, Reference]()
    while unsent or flying or there:
        moves = [("land", index) for index in flying] + [("done", index) for index in there]
        if unsent and len(flying) + len(there) < window:
            moves.append(("put", unsent[0]))
        move, index = data.draw(st.sampled_from(moves))
        if move == "put":
            slot = departures.free()
            if slot is None:
                departures.learn(freed)
                slot = departures.free()
            assert slot is not None, "a place is free whenever the window allows a piece"
            assert slot not in {one.slot for one in (*flying.values(), *there.values())}
            flying[unsent.pop(0)] = Reference(slot, departures.write(slot), LENGTH)
            assert not arrivals.check(index, flying[index])
        elif move == "land":
            there[index] = flying.pop(index)
            arrivals.landed(index, there[index])
            assert arrivals.check(index, there[index])
        else:
            where = there.pop(index)
            freed[where.slot] = arrivals.done(index, where)
            with pytest.raises(ConnectorError):
                arrivals.check(index, where)
        assert arrivals.complete == (not (unsent or flying or there))


@given(
    index=st.integers(-1, 8),
    reference=st.builds(Reference, st.integers(0, 3), st.integers(0, 3), st.integers(0, 200)),
)
def test_invalid_events_are_rejected_without_effect(index: int, reference: Reference) -> None:
    arrivals = ReceiverSlots(range(3, 8), 2, LENGTH)
    first, second = Reference(0, 1, 10), Reference(1, 1, 20)
    arrivals.landed(3, first)
    arrivals.landed(4, second)
    arrivals.done(4, second)
    possible = {(3, first)} | {(other, Reference(1, 2, length)) for other in (5, 6, 7) for length in range(LENGTH + 1)}
    if (index, reference) in possible:
        assert arrivals.check(index, reference) == (index == 3)
    else:
        with pytest.raises(ConnectorError):
            arrivals.check(index, reference)
        arrivals.landed(index, reference)
        with suppress(ConnectorError):
            assert not arrivals.check(index, reference)
    assert arrivals.check(3, first)


def test_piece_is_not_done_before_it_arrives() -> None:
    arrivals = ReceiverSlots(range(2), 1, LENGTH)
    with pytest.raises(ConnectorError):
        arrivals.done(0, Reference(0, 1, 10))


@pytest.mark.parametrize("freed", [[2, 0], [0, 1], [0, 0]], ids=str)
def test_impossible_counts_are_rejected(freed: list[int]) -> None:
    departures = SenderSlots(2)
    departures.write(0)
    departures.learn([1, 0])
    with pytest.raises(ConnectorError):
        departures.learn(freed)
