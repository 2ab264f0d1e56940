"""Write-behind is bounded and counts what it drops."""

from __future__ import annotations

import time

import numpy as np
import pytest

from fd_core.effects.port import OnceLogger
from fd_core.effects.thread_loop import ThreadLoop
from fd_core.kv.stores.contract import FailureReason
from fd_core.kv.stores.envelope import Envelope
from fd_core.kv.tiers.guarded_store import GuardedStore
from fd_core.kv.tiers.stats import TierStats
from fd_core.kv.tiers.writer import WriteBehind

from .scripted import BLOCK_BYTES, SECRET, Clock, ScriptedStore, chain, content

KEYS = chain("w", 8)


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
def counters() -> TierStats:
    return TierStats()


@pytest.fixture
def guarded(store) -> GuardedStore:
    return GuardedStore(store, OnceLogger(), Clock())


@pytest.fixture
def lost() -> list[bytes]:
    return []


@pytest.fixture
def writer(guarded, counters, lost) -> WriteBehind:
    """A writer whose thread is not started."""
    return WriteBehind(
        ThreadLoop("fdcore-test"),
        guarded,
        Envelope(SECRET),
        counters,
        OnceLogger(),
        limit_bytes=4 * BLOCK_BYTES,
        batch=3,
        put_seconds=1.0,
        lost=lost.extend,
        clock=time.monotonic,
    )


def test_blocks_are_written_in_batches_and_open_again(writer, store, counters) -> None:
    for key in KEYS[:4]:
        assert writer.offer(key, content(key))
    assert writer.pending_bytes == 4 * BLOCK_BYTES
    while writer.loop.run_one():
        pass
    assert store.calls == ["put", "put"]
    for key in KEYS[:4]:
        opened = Envelope(SECRET).open(key, store.values[key], BLOCK_BYTES)
        assert np.array_equal(np.frombuffer(opened, np.float32), content(key).ravel())
    assert writer.pending_bytes == 0 and counters.written_blocks == 4


def test_array_is_written_without_copying(writer, store) -> None:
    array, seen = content(KEYS[0]), []
    store.put = lambda values, timeout: seen.append(values[0][1][1]) or 1
    writer.offer(KEYS[0], array)
    writer.loop.run_one()
    assert seen[0].obj is array


def test_too_small_store_is_reported_once(writer, store, counters, caplog) -> None:
    store.put = lambda values, timeout: 0
    for key in KEYS[:4]:
        writer.offer(key, content(key))
    while writer.loop.run_one():
        pass
    (message,) = caplog.messages
    assert "exceeds the limit of the KV store, so nothing is stored" in message
    assert counters.dropped_blocks == 4


def test_full_queue_rejects_and_duplicates_are_skipped(writer) -> None:
    assert [writer.offer(key, content(key)) for key in KEYS[:5]] == [True] * 4 + [False]
    assert writer.offer(KEYS[0], content(KEYS[0]))
    assert writer.pending_bytes == 4 * BLOCK_BYTES
    while writer.loop.run_one():
        pass
    assert writer.offer(KEYS[0], content(KEYS[0])) and writer.pending_bytes == BLOCK_BYTES


@pytest.mark.parametrize("fault", [FailureReason.FULL, FailureReason.TIMEOUT, ValueError, "huge number"])
def test_failed_writes_are_dropped_and_counted(writer, store, guarded, counters, lost, fault) -> None:
    writer.offer(KEYS[1], content(KEYS[1]))
    writer.loop.run_one()
    assert lost == []
    store.fault = lambda method: fault
    writer.offer(KEYS[0], content(KEYS[0]))
    writer.loop.run_one()
    assert writer.pending_bytes == 0
    assert counters.dropped_blocks == 1
    assert lost == [KEYS[0]]
    assert sum(guarded.errors.values()) == 1


def test_open_breaker_rejects_and_drops_queued_blocks(writer, store, counters) -> None:
    store.fault = lambda method: FailureReason.UNREACHABLE
    for key in KEYS[:4]:
        writer.offer(key, content(key))
    while writer.loop.run_one():
        pass
    assert store.calls == ["put"]
    assert counters.dropped_blocks == 4
    assert not writer.offer(KEYS[5], content(KEYS[5])) and not writer.accepts(1)


def test_close_writes_within_timeout(writer, store, counters) -> None:
    for key in KEYS[:4]:
        writer.offer(key, content(key))
    writer.loop.start()
    assert writer.close(5.0)
    assert counters.written_blocks == 4 and len(store.values) == 4


def test_close_without_time_drops_queue(writer, store, counters) -> None:
    for key in KEYS[:4]:
        writer.offer(key, content(key))
    writer.forget(KEYS[0])
    store.values[KEYS[0]] = b"damaged"
    writer._give_up_at = 0.0
    writer.loop.start()
    assert writer.close(0.0)
    assert store.calls == [] and writer.pending_bytes == 0
    assert counters.dropped_blocks == 4


def test_damaged_values_are_deleted_with_bounded_queue(writer, store) -> None:
    damaged = [number.to_bytes(2, "big") * 8 for number in range(2000)]
    store.values |= dict.fromkeys(damaged, b"damaged")
    for key in damaged * 2:
        writer.forget(key)
    while writer.loop.run_one():
        pass
    assert store.calls == ["delete"] * 1024 and list(store.values) == damaged[1024:]


@pytest.mark.parametrize("first", ["forgotten", "offered"])
def test_replacement_of_damaged_value_is_not_deleted(writer, store, first: str) -> None:
    """A batch takes what is queued, including blocks offered after a later deletion."""
    writer.offer(KEYS[0], content(KEYS[0]))
    store.values[KEYS[1]] = b"damaged"
    if first == "offered":
        writer.offer(KEYS[1], content(KEYS[1]))
    writer.forget(KEYS[1])
    writer.offer(KEYS[1], content(KEYS[1]))
    while writer.loop.run_one():
        pass
    opened = Envelope(SECRET).open(KEYS[1], store.values[KEYS[1]], BLOCK_BYTES)
    assert np.array_equal(np.frombuffer(opened, np.float32), content(KEYS[1]).ravel())
