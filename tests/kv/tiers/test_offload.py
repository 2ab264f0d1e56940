"""Results of lookups, loads and saves by tier and by fault. The test runs the thread jobs."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from fd_core.effects.operations import Cancel, Found, Load, Loaded, LoadPaceMeasured, Lookup, NotStored, Save, Saved
from fd_core.kv.block_format import BlockFormat
from fd_core.kv.stores.contract import FailureReason

from .scripted import BLOCK_BYTES, FAULTS, Rig, chain, content

KEYS = chain("t", 40)


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def save(rig: Rig, count: int, *, persist: bool = False, number: int = 1, keys=KEYS):
    blocks = range(count)
    rig.cache.fill(blocks, keys[:count])
    rig.cache.readable = set(blocks)
    rig.offload.perform([Save(number, tuple(keys[:count]), ids(*blocks), persist)])
    rig.run()
    return rig.completed()


def load(rig: Rig, count: int, *, number: int = 2, keys=KEYS):
    blocks = range(40 - count, 40)
    rig.cache.writable = set(blocks)
    rig.offload.perform([Load(number, tuple(keys[:count]), ids(*blocks))])
    rig.run()
    (loaded,) = rig.completed()
    for key, block in zip(keys[: loaded.blocks], blocks, strict=False):
        assert np.array_equal(rig.cache.data[block], content(key))
    assert rig.cache.broken_rules == []
    return loaded


def look_up(rig: Rig, keys=KEYS[:6], number: int = 3):
    rig.offload.perform([Lookup(number, tuple(keys))])
    rig.run()
    return rig.completed()


def pace(rig: Rig) -> LoadPaceMeasured:
    """Return the last reported rate."""
    return [event for event in rig.news if isinstance(event, LoadPaceMeasured)][-1]


def test_operations_on_empty_tiers_complete_immediately() -> None:
    rig = Rig(store=False)
    rig.offload.perform([Lookup(1, KEYS), Load(2, KEYS[:2], ids(0, 1)), Lookup(3, ()), Save(4, (), ids(), True)])
    assert rig.completed() == [Found(1, 0, 0), Loaded(2, 0), Found(3, 0, 0), Saved(4, 0)]


def test_saved_blocks_are_loaded_from_host_tier() -> None:
    rig = Rig(store=False, host_blocks=8)
    assert save(rig, 5) == [Saved(1, 5, 5)]
    assert look_up(rig) == [Found(3, 5, 5)]
    loaded = load(rig, 6)
    assert (loaded.blocks, loaded.from_host) == (5, 5)
    stats = rig.offload.stats()
    assert (stats.host_blocks, stats.host_bytes, stats.host_limit_bytes) == (5, 5 * BLOCK_BYTES, 8 * BLOCK_BYTES)
    assert (stats.saved_blocks, stats.loaded_blocks_host, stats.host_hit_blocks) == (5, 5, 5)
    assert pace(rig).store_block is None and pace(rig).host_block is not None


def test_lookup_after_save_finds_its_blocks() -> None:
    rig = Rig(store=False)
    rig.cache.readable = {0}
    rig.offload.perform([Save(1, KEYS[:1], ids(0), False), Lookup(2, KEYS[:2])])
    assert rig.completed() == []
    rig.run()
    assert rig.completed() == [Saved(1, 1, 1), Found(2, 1, 1)]


def test_blocks_in_host_tier_are_not_exported_again() -> None:
    rig = Rig(store=False)
    save(rig, 2)
    assert save(rig, 3) == [Saved(1, 3, 3)]
    assert rig.cache.exported == 3


def test_head_of_oversized_prefix_stays_in_host_tier() -> None:
    rig = Rig(store=False, host_blocks=3)
    save(rig, 2, keys=chain("old", 2))
    assert save(rig, 6) == [Saved(1, 3, 3)]
    assert look_up(rig) == [Found(3, 3, 3)]


def test_blocks_only_in_store_are_not_reported_in_host_tier() -> None:
    rig = Rig(host_blocks=3)
    assert save(rig, 6, persist=True) == [Saved(1, 6, 3)]
    rig.store.values.clear()
    assert load(rig, 6).blocks == 3


def test_unwritten_blocks_are_reported_once() -> None:
    rig = Rig(host_blocks=8, pending_bytes=2 * BLOCK_BYTES)
    rig.store.fault = lambda method: FailureReason.FULL
    save(rig, 3, persist=True)
    assert [event for event in rig.news if isinstance(event, NotStored)] == [NotStored(KEYS[2:3]), NotStored(KEYS[:2])]
    rig.news.clear()
    rig.store.fault = lambda method: None
    save(rig, 2, persist=True)
    assert rig.news == [] and set(rig.store.values) == set(KEYS[:2])


def test_load_rate_is_reported_on_change() -> None:
    rig = Rig(store=False)
    save(rig, 2)
    assert rig.news == []
    load(rig, 2)
    assert pace(rig) == LoadPaceMeasured(host_block=0.0)
    rig.news.clear()
    look_up(rig)
    assert rig.news == []
    rig.clock.now += 61.0
    assert rig.completed() == [] and rig.news == [LoadPaceMeasured()]


def test_saved_blocks_reach_store_once_and_are_shared() -> None:
    rig = Rig(host_blocks=8)
    assert save(rig, 5, persist=True) == [Saved(1, 5, 5)]
    save(rig, 5, persist=True)
    assert rig.offload.stats().written_blocks == 5
    other = Rig(host_blocks=0)
    other.store.values = rig.store.values
    assert look_up(other) == [Found(3, 0, 5)]
    loaded = load(other, 6)
    assert (loaded.blocks, loaded.from_host) == (5, 0)
    stats = other.offload.stats()
    assert (stats.store_hit_blocks, stats.loaded_blocks_store, stats.host_bytes) == (5, 5, 0)
    assert pace(other).store_latency is not None
    assert stats.store == "scripted://host"


def test_save_completes_before_the_store_write() -> None:
    rig = Rig()
    rig.cache.readable = {0}
    rig.offload.perform([Save(1, KEYS[:1], ids(0), True)])
    rig.offload._copier.loop.run_one()
    assert rig.completed() == [Saved(1, 1, 1)]
    assert rig.store.calls == [] and rig.offload.stats().pending_write_bytes == BLOCK_BYTES
    save(rig, 2, persist=False)
    assert set(rig.store.values) == {KEYS[0]}


def test_arrays_live_until_written_without_host_tier() -> None:
    rig = Rig(host_blocks=0)
    assert save(rig, 5, persist=True) == [Saved(1, 5)]
    assert save(rig, 5, persist=False, keys=chain("other", 5)) == [Saved(1, 0)]
    stats = rig.offload.stats()
    assert (stats.host_bytes, stats.pending_write_bytes, stats.written_blocks) == (0, 0, 5)


def test_host_tier_and_store_continue_each_other() -> None:
    rig = Rig(host_blocks=8)
    save(rig, 6)
    for gap in (KEYS[1], KEYS[4]):
        array = rig.offload._host._arrays.pop(gap)
        rig.offload._host.bytes -= array.nbytes
    assert look_up(rig) == [Found(3, 1, 1)]
    rig.store.seed(KEYS[:2], rig.envelope)
    assert look_up(rig) == [Found(3, 1, 4)]
    assert (load(rig, 6).blocks, load(rig, 6).from_host) == (4, 4)  # the second one finds all in the host tier
    rig.store.seed([KEYS[4]], rig.envelope)
    assert look_up(rig) == [Found(3, 4, 6)]
    loaded = load(rig, 6)
    assert (loaded.blocks, loaded.from_host) == (6, 5)


def test_long_loads_are_batched_and_fill_host_tier() -> None:
    rig = Rig(host_blocks=20)
    rig.store.seed(KEYS[:35], rig.envelope)
    assert load(rig, 40).blocks == 35
    assert rig.store.calls == ["get"] * 3
    assert look_up(rig, KEYS[:20]) == [Found(3, 20, 20)]


def test_fetch_stops_at_the_end_of_a_prefix() -> None:
    rig = Rig(host_blocks=0)
    rig.store.seed(KEYS[:3], rig.envelope)
    copier, reader, _ = rig.loops
    rig.cache.writable = {0, 1, 2}
    rig.offload.perform([Load(1, KEYS, ids(*range(40)))])
    copier.run_one()
    while reader.run_one():
        pass
    assert rig.store.calls == ["get"]
    rig.run()
    (loaded,) = rig.completed()
    assert loaded.blocks == 3 and rig.store.calls == ["get"]


def test_cancelled_load_is_not_fetched() -> None:
    rig = Rig()
    rig.offload.perform([Load(1, KEYS[:2], ids(0, 1))])
    rig.offload._copier.loop.run_one()
    rig.offload.perform([Cancel(1)])
    rig.run()
    assert rig.completed() == [Loaded(1, 0)] and rig.store.calls == []


def test_batch_arriving_after_end_stays_on_host() -> None:
    rig = Rig(host_blocks=40)
    rig.store.seed(KEYS, rig.envelope)
    copier, reader, _ = rig.loops
    rig.cache.writable = {0}
    rig.offload.perform([Load(1, KEYS, ids(*range(40)))])
    copier.run_one()
    assert reader.run_one() and reader.run_one()
    rig.cache.between = lambda: rig.offload.perform([Cancel(1)])
    rig.run()
    assert [loaded.blocks for loaded in rig.completed()] == [1]
    assert rig.store.calls == ["get", "get"] and rig.cache.broken_rules == []
    assert look_up(rig, KEYS[:32]) == [Found(3, 32, 32)]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_store_faults_shorten_prefix_and_are_counted(fault) -> None:
    rig = Rig(host_blocks=0)
    rig.store.seed(KEYS[:3], rig.envelope)
    rig.store.fault = lambda method: fault if method != "delete" else None
    (found,) = look_up(rig)
    assert found.total in (0, 3)
    loaded = load(rig, 3)
    assert loaded.blocks < 3 or fault == "huge number"
    stats = rig.offload.stats()
    assert bool(stats.store_errors) != bool(stats.damaged) or fault == "absent"
    if fault in ("flipped", "truncated"):
        assert loaded.blocks == 2
        assert stats.damaged == {"digest" if fault == "flipped" else "length": 1}
        assert KEYS[2] not in rig.store.values and KEYS[1] in rig.store.values


def test_open_breaker_prevents_store_calls() -> None:
    rig = Rig(host_blocks=4)
    save(rig, 2)
    rig.store.seed(KEYS[:4], rig.envelope)
    rig.store.fault = lambda method: FailureReason.UNREACHABLE
    assert look_up(rig) == [Found(3, 2, 2)]
    rig.store.fault = lambda method: None
    assert look_up(rig) == [Found(3, 2, 2)]
    assert load(rig, 4).blocks == 2
    assert rig.store.calls == ["longest_prefix"] and rig.offload.stats().breaker == "open"
    rig.clock.now += 1.0
    assert look_up(rig) == [Found(3, 2, 4)]
    assert rig.offload.stats().breaker == "closed"


def test_store_with_failing_writes_is_still_read() -> None:
    rig = Rig(host_blocks=0)
    rig.store.seed(KEYS[:2], rig.envelope)
    rig.store.fault = lambda method: FailureReason.UNREACHABLE if method == "put" else None
    save(rig, 2, persist=True, keys=chain("new", 2))
    stats = rig.offload.stats()
    assert (stats.write_breaker, stats.breaker, stats.dropped_blocks) == ("open", "closed", 2)
    assert load(rig, 2).blocks == 2
    assert save(rig, 2, persist=True, keys=chain("new", 2)) == [Saved(1, 0)]
    assert rig.offload.stats().dropped_blocks == 3  # the first block that cannot be kept ends it


def test_expired_lookup_returns_partial_result() -> None:
    rig = Rig(load_seconds=1.0)
    save(rig, 2)
    rig.store.seed(KEYS[:4], rig.envelope)
    answers = []

    def late(method, timeout):
        rig.clock.now += 0.25
        answers.extend(rig.completed())

    rig.store.within = late
    assert look_up(rig) == []
    assert answers == [Found(3, 2, 2)]
    assert rig.offload.stats().lookups_expired == 1 and rig.offload.stats().store_hit_blocks == 0


def test_expired_load_keeps_complete_copies_only() -> None:
    rig = Rig(host_blocks=0, load_seconds=1.0)
    rig.store.seed(KEYS[:40], rig.envelope)
    copies = []

    def between():
        copies.append(1)
        if len(copies) == 10:
            rig.clock.now += 1.0
            assert rig.completed() == []  # a copy is in progress

    rig.cache.between = between
    loaded = load(rig, 40)
    assert loaded.blocks == 10 == len(copies)
    assert loaded.seconds >= 1.0
    assert rig.offload.stats().load_expired == 1
    assert look_up(rig, KEYS[:2]) == [Found(3, 0, 2)]


@pytest.mark.parametrize("after", [1, 3])
def test_cancel_ends_loads_and_saves_at_next_block(after) -> None:
    rig = Rig(host_blocks=8)
    rig.cache.readable = rig.cache.writable = set(range(40))
    copies = []

    def between():
        copies.append(1)
        if len(copies) == after:
            rig.offload.perform([Cancel(1), Cancel(1), Cancel(99)])

    rig.cache.between = between
    assert save(rig, 5) == [Saved(1, after, after)]
    rig.cache.between = lambda: None
    save(rig, 5)
    copies.clear()
    rig.cache.between = between
    assert load(rig, 5, number=1).blocks == after


def test_operation_cancelled_before_start_touches_nothing() -> None:
    rig = Rig()
    rig.cache.readable = rig.cache.writable = set()
    rig.offload.perform([Save(1, KEYS[:2], ids(0, 1), True), Load(2, KEYS[:2], ids(2, 3)), Lookup(3, KEYS)])
    rig.offload.perform([Cancel(1), Cancel(2), Cancel(3)])
    assert rig.completed() == [Saved(1, 0), Loaded(2, 0), Found(3, 0, 0)]
    rig.run()
    assert rig.completed() == [] and rig.cache.broken_rules == [] and rig.store.calls == []


def test_expired_save_returns_its_blocks() -> None:
    rig = Rig()
    rig.offload.perform([Save(1, KEYS[:2], ids(0, 1), True)])
    rig.clock.now += 1.0
    assert rig.completed() == [Saved(1, 0)]
    rig.run()
    assert rig.cache.broken_rules == [] and rig.offload.stats().saves_expired == 1


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_failing_cache_ends_prefix_not_thread(error) -> None:
    rig = Rig()
    save(rig, 2)
    rig.cache.fails = error
    assert save(rig, 4) == [Saved(1, 2, 2)]
    assert load(rig, 4).blocks == 0
    rig.cache.fails = None
    assert load(rig, 4).blocks == 2
    assert rig.offload.stats().copy_errors == 2


def test_evicted_block_frees_memory() -> None:
    rig = Rig(host_blocks=1)
    rig.store.seed(KEYS[:8], rig.envelope)
    save(rig, 1)
    saved = weakref.ref(rig.offload._host.get(KEYS[0]))
    load(rig, 8, keys=KEYS[1:])
    gc.collect()
    assert saved() is None
    (array,) = rig.offload._host._arrays.values()
    assert array.base is not None and array.base.nbytes <= BLOCK_BYTES


def test_values_in_larger_buffers_are_copied() -> None:
    block = BlockFormat(np.float32, (4,))
    alone, shared = bytes(64) + np.arange(4, dtype=np.float32).tobytes(), bytearray(4096)
    shared[256:272] = alone[64:]
    assert np.shares_memory(block.array(memoryview(alone)[64:]), np.frombuffer(alone, np.uint8))
    kept = block.array(memoryview(shared)[256:272])
    assert not np.shares_memory(kept, np.frombuffer(shared, np.uint8))
    assert kept.tolist() == [0, 1, 2, 3] and not kept.flags.writeable
    assert block.array(memoryview(bytes(1) + alone[64:])[1:]).tolist() == [0, 1, 2, 3]
