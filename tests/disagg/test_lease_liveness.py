"""Without faults every lease succeeds, for any engine speed and any message order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count, cycle

from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.disagg.messages import KVPiece
from tests.disagg.world import SILENCE, Owed, Packet, World

LATE = SILENCE / 8
LONGEST = 200.0

LEASES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=4)
DELAYS = st.lists(st.floats(0, LATE), min_size=1, max_size=20)
COMPUTING = st.lists(st.sampled_from([0.0, 0.5, SILENCE / 2, SILENCE, 3 * SILENCE]), min_size=1, max_size=6)
FATES = st.lists(st.sampled_from(["arrive", "arrive", "twice"]), min_size=1, max_size=9)
FATES_WITH_LOSS = st.lists(st.sampled_from(["arrive", "lose", "twice"]), min_size=1, max_size=9)


def live(
    leases: Sequence[tuple[int, int, int]], delays: Sequence[float], computing: Sequence[float], fates: Sequence[str]
) -> World:
    """Open leases of (blocks, first, window) and run due events until all leases have ended.

    Each message takes the next of `delays` seconds, each block of each lease the next of `computing`. Each message
    that is not a piece has the next of `fates`; of two consecutive messages of one side about a lease at most one is
    lost.
    """
    world = World(longest=LONGEST)
    for blocks, first, window in leases:
        world.open(blocks, first=first, window=window)
    delay, fate, computes, ordinal = cycle(delays), cycle(fates), cycle(computing), count()
    due: list[tuple[float, int, Packet | Owed]] = []
    computed: dict[tuple[str, int], float] = {}
    lost: dict[tuple[str, bool], bool] = {}
    while world.decode or world.prefill:
        assert world.now < 1000.0 + 2 * LONGEST
        for packet in world.flying:
            what = "arrive" if isinstance(packet.message, KVPiece) else next(fate)
            way = packet.message.lease, packet.to_decode
            lost[way] = what == "lose" and not lost.get(way, False)
            for _ in range(0 if lost[way] else 2 if what == "twice" else 1):
                heapq.heappush(due, (world.now + next(delay), next(ordinal), packet))
        world.flying.clear()
        for owed in world.prefill.values():
            if owed.accepted and owed.unfinished:
                step = owed.opening.lease, owed.computed
                if step not in computed:
                    computed[step] = world.now + next(computes)
                    heapq.heappush(due, (computed[step], next(ordinal), owed))
        tick = world.next_tick()
        if not due or tick < due[0][0]:
            world.now = max(world.now, tick)
            world.tick()
            continue
        time, _, event = heapq.heappop(due)
        world.now = max(world.now, time)
        if isinstance(event, Owed):
            world.compute(event, 1)
        else:
            world.flying.append(event)
            world.deliver(-1)
        for leased in [*world.decode.values()]:
            while leased.taking:
                world.copy(leased, 0)
        for owed in [*world.prefill.values()]:
            while owed.puts:
                world.put(owed, 0)
    return world


@settings(max_examples=60, deadline=None)
@given(leases=LEASES, delays=DELAYS, computing=COMPUTING, fates=FATES)
def test_reliable_network_transfers_every_lease(
    leases: list[tuple[int, int, int]], delays: list[float], computing: list[float], fates: list[str]
) -> None:
    world = live(leases, delays, computing, fates)
    assert list(world.outcomes.values()) == ["transferred"] * len(leases)
    assert {owed.lease.ended for owed in world.closed_prefill} <= {"confirmed", "aborted"}


@settings(max_examples=60, deadline=None)
@given(leases=LEASES, delays=DELAYS, computing=COMPUTING, fates=FATES_WITH_LOSS)
def test_lost_control_message_costs_only_time(
    leases: list[tuple[int, int, int]], delays: list[float], computing: list[float], fates: list[str]
) -> None:
    world = live(leases, delays, computing, fates)
    assert list(world.outcomes.values()) == ["transferred"] * len(leases), world.reasons


@settings(max_examples=30, deadline=None)
@given(leases=LEASES, delays=DELAYS, computing=COMPUTING)
def test_both_sides_agree_if_messages_arrive_once(
    leases: list[tuple[int, int, int]], delays: list[float], computing: list[float]
) -> None:
    world = live(leases, delays, computing, ["arrive"])
    assert list(world.outcomes.values()) == ["transferred"] * len(leases)
    ended = [owed.lease.ended for owed in world.closed_prefill if world.incarnations[owed.opening.lease] == 1]
    # A commit that was retransmitted meanwhile is answered with an abort, which may precede the confirmation.
    assert set(ended) <= {"confirmed", "aborted"}
