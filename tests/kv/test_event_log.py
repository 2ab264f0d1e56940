"""KV event log: late readers, lost readers, and engines that end."""

from __future__ import annotations

import asyncio

from fd_core.engine.process.messages import StepEvents
from fd_core.kv.event_log import KVEventLog
from fd_core.types.kv_events import BEGINNING, Cleared, Removed, Stored
from tests.engine.helpers import null_engine, random_specs, run
from tests.kv.following import SIZE, Reader, ids
from tests.server.fakes import FakeClient


def stored(key: bytes, *tokens: int, parent: bytes = BEGINNING) -> Stored:
    return Stored(parent, (key,), ids(tokens))


A, B, C = stored(b"a", 1, 2), stored(b"b", 3, 4, parent=b"a"), stored(b"c", 5, 6)


def follow(reader: Reader, log: KVEventLog, after: int | None) -> int:
    number, events = log.read(after)
    for event in events:
        reader.apply(event)
    return number


def test_reader_resumes_at_its_position() -> None:
    log, reader = KVEventLog(SIZE), Reader()
    log.extend([A])
    number = follow(reader, log, None)
    log.extend([B, C])
    assert log.read(number) == (3, (B, C))
    assert follow(reader, log, number) == 3 and log.read(3) == (3, ())
    log.extend([Removed((b"a",))])
    follow(reader, log, 3)
    assert reader.paths == {(1, 2, 3, 4), (5, 6)}


def test_reader_out_of_range_receives_full_snapshot() -> None:
    log = KVEventLog(SIZE, capacity=2)
    log.extend([A, B, C, Removed((b"a",))])
    whole = (Cleared(), Stored(BEGINNING, (b"a", b"b"), ids([1, 2, 3, 4])), C, Removed((b"a",)))
    for after in (None, 0, 1, 5, -1):
        assert log.read(after) == (4, whole)
    assert log.read(2) == (4, (C, Removed((b"a",))))
    log.extend([Stored(BEGINNING, (b"d", b"e", b"f"), ids([7] * 6))])
    assert log.read(4)[1][0] == Cleared(), "an event larger than the whole log"


def test_dead_engine_holds_no_blocks() -> None:
    async def scenario() -> None:
        client = FakeClient(kv_events=True, block_size=SIZE)
        assert client.kv_log is not None
        client._dispatch(StepEvents([], kv=(A, B)))
        assert client.kv_log.read(0) == (2, (A, B))
        client._engine_lost("it died")
        assert client.kv_log.read(None)[1] == (Cleared(),) and client.kv_log.read(2) == (3, (Cleared(),))
        client._dispatch(StepEvents([], kv=(C,)))
        assert client.kv_log.read(3) == (3, ()), "an ended epoch published events"
        assert FakeClient().kv_log is None

    asyncio.run(scenario())


def test_each_engine_publishes_only_its_blocks() -> None:
    """Engines that share a store use the same key for the same prefix."""
    log = KVEventLog(SIZE, engines=2)
    log.extend([A, B])
    log.extend([A], 1)
    log.extend([Removed((b"b",))])
    readers = Reader(), Reader()
    for event in log.read(0)[1]:
        readers[event.engine].apply(event)
    assert [reader.paths for reader in readers] == [{(1, 2)}, {(1, 2)}]
    log.restart(1)
    _, (first, second, third) = log.read(None)
    assert (first, second, third) == (Cleared(), A, Cleared(engine=1))
    assert log.read(4) == (5, (Cleared(engine=1),))


def test_waiting_reader_is_woken_by_events_and_by_close() -> None:
    async def scenario() -> None:
        log = KVEventLog(SIZE)
        for end in (lambda: log.extend([A]), log.close):
            number = log.read(None)[0]
            waiting = asyncio.create_task(log.wait(number, 60))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting.done()
            end()
            await asyncio.wait_for(waiting, 60)
        await asyncio.wait_for(log.wait(log.read(None)[0], 60), 60)
        assert log.closed and not log._waiting
        fresh = KVEventLog(SIZE)
        await fresh.wait(0, 0.01)

    asyncio.run(scenario())


def test_engine_events_match_its_block_pool() -> None:
    """Far more prompts than blocks, two steps in flight: after each iteration the log equals the pool."""
    engine = null_engine(kv_events=True, num_kv_blocks=26, block_size=16, pipeline_depth=2)
    log, published = KVEventLog(16), 0
    for spec in random_specs(30, seed=3):
        engine.submit(spec)
    while engine.has_work:
        engine.step()
        events = engine.take_kv_events()
        published += len(events)
        log.extend(events)
        assert set(log._stored[0]) == set(engine.probe().scheduler.probe().pool._block_of)
    assert engine.info.kv_events and published > 40
    assert engine.stats().scheduler.blocks.cached == len(log._stored[0]) > 0


def test_engine_publishes_no_events_unless_enabled() -> None:
    engine = null_engine()
    run(engine, random_specs(3, seed=1))
    assert engine.take_kv_events() == () and not engine.info.kv_events
    assert not null_engine(kv_events=True, enable_prefix_caching=False).info.kv_events
