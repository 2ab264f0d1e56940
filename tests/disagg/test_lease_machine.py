"""Adversarial orders: loss, repetition, reordering, delay, damage, crashes, aborts and expiry.

The invariants are in `world`, checked whenever either side acts; the rules here choose the events. At the end the
network is reliable, and every lease must end on both sides within its silence timeout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from fd_core.disagg.lease import requested_pieces
from fd_core.disagg.messages import Accept, Credit, Heartbeat, KVPiece
from tests.disagg.world import LONGEST, SILENCE, Leased, Owed, Packet, World

T = TypeVar("T")
WHICH = st.integers(0, 99)
ROUNDS = st.sampled_from([1, 1, 2, 5])


class Leases(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.lied_to: set[str] = set()
        """Leases that received invalid credit; only `longest` is sure to end them."""

    # Engines -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.decode) < 6)
    @rule(blocks=st.integers(1, 5), first=st.integers(0, 2), window=st.integers(1, 3))
    def open(self, blocks: int, first: int, window: int) -> None:
        self.world.open(blocks, first=first, window=window)

    @rule(
        blocks=st.integers(2, 5), window=st.integers(1, 3), rounds=st.integers(2, 6), compute=st.sampled_from([1, 1, 5])
    )
    def open_and_go_on(self, blocks: int, window: int, rounds: int, compute: int) -> None:
        self.world.open(blocks, window=window)
        self.world.go_on(rounds, compute=compute)

    @rule(which=WHICH, count=st.integers(1, 5))
    def compute(self, which: int, count: int) -> None:
        busy = [owed for owed in self.world.prefill.values() if owed.accepted and owed.unfinished]
        for owed in chosen(busy, which):
            self.world.compute(owed, count)

    @rule(which=WHICH)
    def put(self, which: int) -> None:
        for owed in chosen(self.with_puts(), which):
            self.world.put(owed, which % len(owed.puts))

    @rule(which=WHICH)
    def copy(self, which: int) -> None:
        for leased in chosen(self.with_takes(), which):
            self.world.copy(leased, which % len(leased.taking))

    @rule(rounds=ROUNDS, compute=st.integers(0, 2))
    def go_on(self, rounds: int, compute: int) -> None:
        self.world.go_on(rounds, compute=compute)

    @rule(working=st.booleans())
    def stall_or_work(self, working: bool) -> None:
        self.world.working = working

    @rule(refusing=st.sampled_from([True, False, False]), deciding=st.sampled_from([True, True, False]))
    def set_decisions(self, refusing: bool, deciding: bool) -> None:
        self.world.refusing, self.world.deciding = refusing, deciding

    @rule(which=WHICH)
    def decide(self, which: int) -> None:
        for owed in chosen([owed for owed in self.world.prefill.values() if not owed.accepted], which):
            self.world.decide(owed)

    def with_puts(self) -> list[Owed]:
        return [owed for owed in (*self.world.prefill.values(), *self.world.closed_prefill) if owed.puts]

    def with_takes(self) -> list[Leased]:
        return [leased for leased in (*self.world.decode.values(), *self.world.closed_decode) if leased.taking]

    # Ends of leases ----------------------------------------------------------------------------------------------

    @rule(
        how=st.sampled_from(["abort", "abort", "give up", "give up", "stop early", "break", "crash", "cut"]),
        which=WHICH,
    )
    def end(self, how: str, which: int) -> None:
        world = self.world
        if how == "abort":
            for leased in chosen(world.decode.values(), which):
                world.abort(leased)
        elif how == "give up":
            for owed in chosen([owed for owed in world.prefill.values() if owed.running], which):
                world.give_up(owed)
        elif how == "stop early":
            for owed in chosen([owed for owed in world.prefill.values() if owed.unfinished], which):
                world.finish_early(owed)
        elif how == "break":
            for owed in chosen(self.with_puts(), which):
                world.break_put(owed, which % len(owed.puts))
        elif how == "cut":
            world.cut()
        elif which % 2:
            world.crash_decode()
        else:
            world.crash_prefill()

    # Network -----------------------------------------------------------------------------------------------------

    @rule(which=WHICH)
    def deliver(self, which: int) -> None:
        if self.world.flying:
            self.world.deliver(which % len(self.world.flying))

    @rule(count=st.integers(1, 6))
    def deliver_the_last_first(self, count: int) -> None:
        for _ in range(min(count, len(self.world.flying))):
            self.world.deliver(-1)

    @rule(which=WHICH)
    def lose(self, which: int) -> None:
        if self.world.flying:
            self.world.flying.pop(which % len(self.world.flying))

    @rule(which=WHICH)
    def repeat(self, which: int) -> None:
        if self.world.arrived:
            self.world.repeat(which % len(self.world.arrived))

    @rule(which=WHICH)
    def repeat_a_piece(self, which: int) -> None:
        """Repeat a piece at once, of an open lease if there is one: before or after it was copied."""
        arrived = [offset for offset, packet in enumerate(self.world.arrived) if isinstance(packet.message, KVPiece)]
        open_ones = [offset for offset in arrived if self.world.arrived[offset].message.lease in self.world.decode]
        for offset in chosen(open_ones or arrived, which):
            self.world.repeat(offset)
            self.world.deliver(-1)

    @rule(how=st.sampled_from(["lose", "repeat", "damage", "mix up"]), which=WHICH)
    def mistreat_a_piece(self, how: str, which: int) -> None:
        world = self.world
        for _ in range(3):
            if not self.pieces():
                world.go_on(1)
        for offset in chosen(self.pieces(), which):
            if how == "lose":
                world.flying.pop(offset)
            elif how == "repeat":
                world.flying.append(world.flying[offset])
            else:
                world.damage(offset, sealed=how == "mix up")

    def pieces(self) -> list[int]:
        return [offset for offset, packet in enumerate(self.world.flying) if isinstance(packet.message, KVPiece)]

    @rule(which=WHICH, index=st.sampled_from([-1, 0, 99]))
    def nonsense(self, which: int, index: int) -> None:
        """Messages known already or for other leases change nothing, except that they count as heartbeats."""
        for leased in chosen(self.world.decode.values(), which):
            name, blocks = leased.opening.lease, requested_pieces(leased.opening)
            outside = KVPiece(name, index if index not in blocks else blocks.stop, b"")
            for message in (outside, Accept(name), Heartbeat(name)):
                self.world.receive_at_decode(Packet(True, message))
            assert leased.lease.outcome is None
        for owed in chosen(self.world.prefill.values(), which):
            self.world.replay_computed(owed)
            self.world.receive_at_prefill(Packet(False, Credit(owed.opening.lease, index)))
            if index == 99:  # more than was received: neither the window nor a lost piece is noticed any more
                self.world.tampered.add(owed.opening.lease)
                self.lied_to.add(owed.opening.lease)

    # Time --------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 1.0, SILENCE / 4, SILENCE / 2]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(seconds=st.sampled_from([SILENCE / 4, SILENCE, LONGEST]), ticks=st.booleans())
    def oversleep(self, seconds: float, ticks: bool) -> None:
        self.world.now += seconds
        if ticks:
            self.world.tick()

    @rule(seconds=st.sampled_from([SILENCE, 3 * SILENCE, LONGEST]), compute=st.sampled_from([0, 0, 1]))
    def a_long_calm(self, seconds: float, compute: int) -> None:
        self.world.wait(seconds, lambda: self.world.settle(compute=compute))

    def teardown(self) -> None:
        world = self.world
        world.refusing, world.deciding = False, True
        for owed in [owed for owed in world.prefill.values() if not owed.accepted]:
            world.decide(owed)
        if len(world.arrived) % 2:  # engines that compute, or are stalled
            world.working = True
        working = world.working
        world.settle()
        world.wait(3 * SILENCE, world.settle)
        left = {*world.decode, *world.prefill}
        assert left <= self.lied_to, f"leases outlive their silence timeout, {working=}"
        world.wait(LONGEST, world.settle)
        assert world.decode == {} and world.prefill == {}
        for leased in self.with_takes():
            while leased.taking:
                world.copy(leased, 0)
        for owed in self.with_puts():
            while owed.puts:
                world.put(owed, 0)
        assert world.flying == []


def chosen(several: Iterable[T], which: int) -> list[T]:
    """Return a list with the chosen item, empty if there is none."""
    there = list(several)
    return [there[which % len(there)]] if there else []


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=70, stateful_step_count=60, deadline=None)
TestLeases = pytest.mark.timeout(120)(TestLeases)


@pytest.mark.soak
@pytest.mark.timeout(900)
class TestLeasesAtLength(Leases.TestCase):
    settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
