"""Adversarial orders of threads, store and clock: every operation completes once and correctly.

Deterministic: thread jobs run one by one in the order that Hypothesis chooses, and in the middle of a copy or of a
store call the engine may collect, cancel or reach a deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fd_core.effects.operations import Cancel, Found, Load, Loaded, Lookup, Save, Saved
from fd_core.kv.tiers.offload import KVOffload

from .scripted import BLOCK_BYTES, FAULTS, Rig, chain, content

CHAINS = [chain(name, 30) for name in "abc"]
LOAD_SECONDS = 1.0
SECONDS = {Lookup: LOAD_SECONDS / 4, Load: LOAD_SECONDS, Save: LOAD_SECONDS}
ANSWER = {Lookup: Found, Load: Loaded, Save: Saved}
JUNK = -1.0


@dataclass
class Operation:
    effect: Lookup | Load | Save
    deadline: float


class TiersMachine(RuleBasedStateMachine):
    @initialize(host_blocks=st.integers(0, 6), store=st.booleans(), pending_blocks=st.integers(0, 8))
    def begin(self, host_blocks, store, pending_blocks) -> None:
        self.rig = Rig(
            host_blocks=host_blocks, store=store, load_seconds=LOAD_SECONDS, pending_bytes=pending_blocks * BLOCK_BYTES
        )
        self.offload: KVOffload = self.rig.offload
        self.cache = self.rig.cache
        self.cache.data[:] = JUNK
        self.free = list(range(self.cache.num_blocks))
        self.open: dict[int, Operation] = {}
        self.number = 0
        self.inside = None
        self.fault = None
        self.saved: set[bytes] = set()
        self.cache.between = self.meanwhile
        if self.rig.store:
            self.rig.store.fault = lambda method: self.fault
            self.rig.store.within = lambda method, timeout: self.meanwhile()

    # Engine -----------------------------------------------------------------------------------------------

    def ask(self, effect) -> None:
        self.open[effect.operation] = Operation(effect, self.rig.clock.now + SECONDS[type(effect)])
        self.offload.perform([effect])

    def next(self) -> int:
        self.number += 1
        return self.number

    def take_blocks(self, count: int) -> np.ndarray:
        taken, self.free = self.free[:count], self.free[count:]
        return np.array(taken, np.int32)

    @rule(keys=st.sampled_from(CHAINS), count=st.integers(0, 30))
    def look_up(self, keys, count) -> None:
        self.ask(Lookup(self.next(), keys[:count]))

    @rule(keys=st.sampled_from(CHAINS), count=st.integers(0, 30))
    def load(self, keys, count) -> None:
        blocks = self.take_blocks(count)
        self.cache.writable |= set(blocks.tolist())
        self.ask(Load(self.next(), keys[: len(blocks)], blocks))

    @rule(keys=st.sampled_from(CHAINS), count=st.integers(0, 12), persist=st.booleans())
    def save(self, keys, count, persist) -> None:
        blocks = self.take_blocks(count)
        self.cache.fill(blocks, keys[: len(blocks)])
        self.cache.readable |= set(blocks.tolist())
        self.saved.update(keys[: len(blocks)])
        self.ask(Save(self.next(), keys[: len(blocks)], blocks, persist))

    @rule(data=st.data())
    def cancel(self, data) -> None:
        self.offload.perform([Cancel(data.draw(st.sampled_from([*self.open, 10**6])))])

    @rule()
    def collect(self) -> None:
        for completion in self.rig.completed():
            self.check(completion)
        if self.inside is None:
            overdue = [operation for operation in self.open.values() if operation.deadline <= self.rig.clock.now]
            assert overdue == []

    def check(self, completion) -> None:
        effect = self.open.pop(completion.operation).effect  # KeyError: answered twice
        assert type(completion) is ANSWER[type(effect)]
        count = len(effect.keys)
        if isinstance(completion, Found):
            assert 0 <= completion.host <= completion.total <= count
            return
        assert 0 <= completion.blocks <= count
        if isinstance(effect, Load):
            assert 0 <= completion.from_host <= completion.blocks
            for key, block in zip(effect.keys[: completion.blocks], effect.blocks, strict=False):
                assert key in self.saved
                assert np.array_equal(self.cache.data[block], content(key))
        blocks = set(effect.blocks.tolist())
        self.cache.readable -= blocks
        self.cache.writable -= blocks
        self.cache.data[effect.blocks] = JUNK
        self.free += sorted(blocks)

    # Environment ------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 1.0, 5.0]))
    def pass_time(self, seconds) -> None:
        self.rig.clock.now += seconds

    @rule(which=st.integers(0, 2), jobs=st.integers(1, 6))
    def run_thread(self, which, jobs) -> None:
        for _ in range(jobs):
            self.rig.loops[which % len(self.rig.loops)].run_one()

    @rule(fault=st.sampled_from([None, *FAULTS]))
    def break_store(self, fault) -> None:
        self.fault = fault

    @rule(
        wait=st.integers(0, 8),
        seconds=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        cancel=st.booleans(),
    )
    def plan_an_interruption(self, wait, seconds, cancel) -> None:
        """Wake the engine in the middle of a copy or call, after so many others."""
        self.plan = (wait, seconds, cancel)

    @rule(error=st.sampled_from([None, None, MemoryError]))
    def break_cache(self, error) -> None:
        self.cache.fails = error

    plan: tuple[int, float, bool] | None = None

    def meanwhile(self) -> None:
        if self.plan is None:
            return
        wait, seconds, cancel = self.plan
        if wait:
            self.plan = (wait - 1, seconds, cancel)
            return
        self.plan = None
        self.rig.clock.now += seconds
        self.inside = True
        if cancel:
            self.offload.perform([Cancel(number) for number in list(self.open)])
        self.collect()
        self.offload.stats()
        self.inside = None

    # Invariants -------------------------------------------------------------------------------------------

    @invariant()
    def returned_blocks_are_not_touched(self) -> None:
        if hasattr(self, "rig"):
            assert self.cache.broken_rules == []
            assert (self.cache.data[self.free] == JUNK).all()

    @invariant()
    def limits_hold(self) -> None:
        if hasattr(self, "rig"):
            stats, host = self.offload.stats(), self.offload._host
            assert stats.host_bytes == sum(array.nbytes for array in host._arrays.values()) <= stats.host_limit_bytes
            assert stats.open_operations <= len(self.open)
            assert stats.pending_write_bytes <= self.offload._writer.limit_bytes

    @precondition(lambda self: self.rig.store)
    @rule()
    def check_the_store(self) -> None:
        for key, value in self.rig.store.values.items():
            assert bytes(self.rig.envelope.open(key, value, BLOCK_BYTES)) == content(key).tobytes()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        self.collect()
        assert self.open == {}, "all jobs have run"
        stats = self.offload.stats()
        assert (stats.pending_write_bytes, stats.open_operations) == (0, 0)
        self.offload.close(0.0)
        assert (len(self.offload._host), self.offload._host.bytes) == (0, 0)
        assert self.offload._pending.numbers() == []
        self.offload.perform([Lookup(10**6, CHAINS[0])])
        assert self.rig.completed() == [Found(10**6, 0, 0)]


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
