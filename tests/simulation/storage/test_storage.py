"""Production tiers under the virtual clock: cost of copies and store calls, and effect of faults."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.backends.null import NullCache
from fd_core.effects.operations import Effect, Found, Load, Loaded, LoadPaceMeasured, Lookup, NotStored, Save, Saved
from fd_core.effects.port import CompletionQueue
from fd_core.kv.stores.contract import FailureReason
from fd_core.ops.contract import KVShape
from fd_core.simulation.clock.timeline import Timeline
from fd_core.simulation.clock.virtual_loop import VirtualThreads
from fd_core.simulation.storage.storage import BlankKVCache, SharedStore, simulated_storage
from tests.simulation.fixed_costs import FixedCosts

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4)
KEYS = tuple(bytes([index]) * 16 for index in range(8))
BLOCK_BYTES = 1 << 20
"""Bytes of a block of the simulated model."""
COPY, ASK, WRITE = 2**-10, 2**-6, 2**-6
EACH = 2**-9


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


class Tiers:
    """KV offload of one worker, and the completions its engine would receive."""

    def __init__(self, timeline: Timeline, store: SharedStore | None = None, *, host_blocks: int = 4, blank=False):
        self.timeline = timeline
        self.threads = VirtualThreads(timeline)
        self.queue = CompletionQueue(self.poll)
        self.cache = BlankKVCache(32, 4) if blank else NullCache(SHAPE, 32)
        self.completed: list[tuple[float, object]] = []
        self.port = simulated_storage(
            self.threads,
            self.queue,
            self.cache,
            FixedCosts(),
            block_bytes=BLOCK_BYTES,
            host_bytes=host_blocks * BLOCK_BYTES,
            store=store,
        )

    def poll(self) -> None:
        """Poll completions like a woken engine."""
        self.timeline.at(self.timeline.now, self.take)

    def take(self) -> None:
        self.completed += [(self.timeline.now, completion) for completion in self.port.completions()]

    def after(self, seconds: float, *effects: Effect) -> list[tuple[float, object]]:
        """Perform effects, run the clock, and return completions with their times, without the load rate."""
        self.completed.clear()
        self.port.perform(effects)
        self.timeline.run(self.timeline.now + seconds)
        self.take()
        return [(at, completion) for at, completion in self.completed if not isinstance(completion, LoadPaceMeasured)]


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


def test_save_and_load_cost_one_copy_per_block(timeline) -> None:
    tiers = Tiers(timeline)
    tiers.cache.hashes[:3] = [[7], [8], [9]]
    assert tiers.after(1.0, Save(1, KEYS[:3], ids(0, 1, 2), False)) == [(3 * COPY, Saved(1, 3, 3))]
    [(at, completion)] = tiers.after(1.0, Load(2, KEYS[:3], ids(5, 6, 7)))
    assert at == 1.0 + 3 * COPY and completion == Loaded(2, 3, 3, 3 * COPY)
    assert (tiers.cache.hashes[5:8] == tiers.cache.hashes[:3]).all()


def test_load_writes_blocks_after_its_copies_end(timeline) -> None:
    tiers = Tiers(timeline)
    tiers.cache.hashes[0] = 7
    tiers.after(1.0, Save(1, KEYS[:1], ids(0), False))
    tiers.port.perform([Load(2, KEYS[:1], ids(5))])
    timeline.run(1.0 + COPY / 2)
    assert not tiers.cache.hashes[5].any()
    timeline.run(1.0 + COPY)
    assert (tiers.cache.hashes[5] == 7).all()


def test_block_modified_during_save_ends_the_run(timeline) -> None:
    tiers = Tiers(timeline)
    timeline.at(COPY / 2, lambda: tiers.cache.hashes[0].fill(3))
    with pytest.raises(RuntimeError, match="was written while it was copied"):
        tiers.after(1.0, Save(1, KEYS[:1], ids(0), False))


def test_stored_block_is_visible_after_write_completes(timeline) -> None:
    store = SharedStore(timeline)
    one, other = Tiers(timeline, store), Tiers(timeline, store)
    one.cache.hashes[:2] = [[7], [8]]
    written = 2 * COPY + WRITE + 2 * EACH
    assert one.after(written - EACH, Save(1, KEYS[:2], ids(0, 1), True)) == [(2 * COPY, Saved(1, 2, 2))]
    assert [completion for _, completion in other.after(EACH, Lookup(1, KEYS[:3]))] == []
    assert [completion for _, completion in other.after(1.0)] == [Found(1, 0, 0)]
    began = timeline.now
    assert other.after(1.0, Lookup(2, KEYS[:3])) == [(began + ASK, Found(2, 0, 2))]
    began = timeline.now
    [(at, completion)] = other.after(1.0, Load(3, KEYS[:2], ids(4, 5)))
    assert at - began == ASK + 2 * EACH + 2 * COPY and (completion.blocks, completion.from_host) == (2, 0)
    assert (other.cache.hashes[4:6] == one.cache.hashes[:2]).all()


def test_workers_share_store_bandwidth(timeline) -> None:
    store = SharedStore(timeline, value_seconds=0.125)
    one, two, three = (Tiers(timeline, store) for _ in range(3))
    one.after(4.0, Save(1, KEYS[:2], ids(0, 1), True))
    for tiers in (two, three):
        tiers.port.perform([Load(2, KEYS[:2], ids(4, 5))])
    timeline.run()
    ends = [
        next(at for at, completion in tiers.completed if isinstance(completion, Loaded)) - 4.0 for tiers in (two, three)
    ]
    assert ends == [0.25 + 2 * COPY, 0.5 + 2 * COPY]


def test_dead_store_delays_only_one_lookup(timeline) -> None:
    store = SharedStore(timeline)
    tiers = Tiers(timeline, store)
    store.fault = FailureReason.TIMEOUT
    assert tiers.after(0.5, Lookup(1, KEYS)) == [(0.25, Found(1, 0, 0))]
    assert tiers.after(0.5, Lookup(2, KEYS)) == [(0.5, Found(2, 0, 0))]
    assert tiers.port.stats().breaker == "open"
    store.fault = None
    tiers.after(2.0)
    tiers.after(1.0, Save(3, KEYS[:1], ids(0), True))
    [(_, found)] = Tiers(timeline, store).after(1.0, Lookup(1, KEYS))
    assert found == Found(1, 0, 1), "the store is used again once it answers"


@pytest.mark.parametrize("fault", ["lost", "damaged", "full", "slow"])
def test_store_faults_shorten_loads_but_never_corrupt(timeline, fault) -> None:
    store = SharedStore(timeline)
    one, other = Tiers(timeline, store), Tiers(timeline, store)
    one.cache.hashes[:4] = [[5], [6], [7], [8]]
    if fault == "full":
        store.write_fault = FailureReason.FULL
    completion = one.after(2.0, Save(1, KEYS[:4], ids(0, 1, 2, 3), True))
    assert any(isinstance(news, NotStored) for _, news in completion) == (fault == "full")
    if fault == "lost":
        store.lose(3)
    elif fault == "damaged":
        store.damage(3)
    elif fault == "slow":
        store.slowness = 1000.0
    [(_, loaded)] = other.after(3.0, Load(2, KEYS[:4], ids(4, 5, 6, 7)))
    assert loaded.blocks == 0
    assert not other.cache.hashes.any()


def test_blank_blocks_cost_the_same(timeline) -> None:
    tiers = Tiers(timeline, blank=True)
    assert tiers.after(1.0, Save(1, KEYS[:3], ids(0, 1, 2), False)) == [(3 * COPY, Saved(1, 3, 3))]
    [(at, completion)] = tiers.after(1.0, Load(2, KEYS[:3], ids(5, 6, 7)))
    assert at == 1.0 + 3 * COPY and completion.blocks == 3


def test_closing_engine_writes_pending_saves(timeline) -> None:
    store = SharedStore(timeline)
    tiers = Tiers(timeline, store)
    tiers.port.perform([Save(1, KEYS[:4], ids(0, 1, 2, 3), True)])
    tiers.port.close()
    timeline.run()
    assert len(store.values.keys()) == 4 and tiers.port.stats().open_operations == 0


def test_equal_effects_give_equal_times_and_bytes(timeline) -> None:
    def once() -> tuple[object, object]:
        clock = Timeline()
        store = SharedStore(clock)
        one, other = Tiers(clock, store), Tiers(clock, store)
        completion = [
            one.after(1.0, Save(1, KEYS, ids(*range(8)), True)),
            other.after(1.0, Load(1, KEYS, ids(*range(8)))),
        ]
        keys = store.values.keys()
        return repr(completion), store.values.get(keys, 2**30, 1.0)

    assert once() == once()
