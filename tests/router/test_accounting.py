"""Guards give back what they hold, once; nothing else writes a counter."""

from __future__ import annotations

from fd_core.router.accounting import IDLE, WorkerLoad, WorkerLoads
from fd_core.router.workers import RouterWorker

MIXED = RouterWorker("http://a", "mixed", 1)
PREFILL = RouterWorker("http://p", "prefill", 2)


def test_the_first_token_gives_back_the_prefill_tokens_and_the_end_the_rest() -> None:
    loads = WorkerLoads()
    guard = loads.take(MIXED, 100)
    assert loads.of(MIXED) == guard.held == WorkerLoad(1, 1, 100)
    guard.first_token()
    guard.first_token()
    assert loads.of(MIXED) == guard.held == WorkerLoad(1, 0, 0)
    assert guard.release()
    assert loads.of(MIXED) == guard.held == IDLE
    assert loads.by_worker() == {}


def test_what_ends_before_its_first_token_gives_back_its_prefill_tokens_as_well() -> None:
    loads = WorkerLoads()
    loads.take(MIXED, 100).release()
    assert loads.by_worker() == {}


def test_the_prefill_side_ends_at_the_first_token() -> None:
    loads = WorkerLoads()
    guard = loads.take(PREFILL, 100, ends_at_first_token=True)
    guard.first_token()
    assert guard.released and loads.by_worker() == {}
    guard.first_token()
    assert loads.faults == 0


def test_a_second_release_is_a_fault_and_changes_nothing() -> None:
    loads = WorkerLoads()
    other, guard = loads.take(MIXED, 7), loads.take(MIXED, 100)
    assert guard.release()
    assert not guard.release()
    assert loads.faults == 1
    assert loads.of(MIXED) == other.held == WorkerLoad(1, 1, 7)


def test_an_earlier_incarnation_keeps_its_own_counters() -> None:
    loads = WorkerLoads()
    again = RouterWorker(MIXED.url, "mixed", 9)
    old, new = loads.take(MIXED, 5), loads.take(again, 3)
    assert (loads.of(MIXED), loads.of(again)) == (old.held, new.held)
    old.release()
    assert (loads.of(MIXED), loads.of(again)) == (IDLE, WorkerLoad(1, 1, 3))


def test_idle_workers_are_told_of_once() -> None:
    told: list[RouterWorker] = []
    loads = WorkerLoads(told.append)
    first, second = loads.take(MIXED, 5), loads.take(MIXED, 0)
    first.release()
    assert told == []
    second.first_token()
    assert told == []
    second.release()
    assert told == [MIXED]
