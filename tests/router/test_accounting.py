"""Selections release what they hold, exactly once; nothing else writes a counter."""

from __future__ import annotations

import msgspec
import pytest

from fd_core.router.selection import IDLE, Selection, WorkerIndices, WorkerLoad, WorkerLoads
from fd_core.router.workers import RouterWorker
from tests.router.helpers import request

MIXED = RouterWorker("http://a", "mixed", 1)
PREFILL = RouterWorker("http://p", "prefill", 2)
DECODE = RouterWorker("http://d", "decode", 3)
WAITING, RUNNING = WorkerLoad(1, 1, 0), WorkerLoad(1, 0, 0)


def loads_of() -> WorkerLoads:
    return WorkerLoads(lambda _: None, WorkerIndices())


def take(loads: WorkerLoads, prefill_tokens: int, *workers: RouterWorker) -> Selection:
    """Count a request whose prompt is computed by the first of its workers."""
    held = dict.fromkeys(workers, WAITING) | {workers[0]: WorkerLoad(1, 1, prefill_tokens)}
    for worker, load in held.items():
        loads.change(worker, *msgspec.structs.astuple(load))
    return Selection(request(), workers, held, loads, lambda _: None)


def test_first_token_releases_prefill_tokens_and_end_the_rest() -> None:
    loads = loads_of()
    selection = take(loads, 100, MIXED)
    assert loads.by_worker[MIXED] == WorkerLoad(1, 1, 100)
    selection.first_token()
    selection.first_token()
    assert loads.by_worker[MIXED] == RUNNING
    assert selection.release()
    assert loads.by_worker == {}


def test_end_before_first_token_releases_prefill_tokens_too() -> None:
    loads = loads_of()
    selection = take(loads, 100, MIXED)
    assert selection.release()
    selection.first_token()
    assert loads.by_worker == {} and loads.faults == 0


@pytest.mark.law("7.1")
def test_prefill_side_is_released_at_the_first_token() -> None:
    loads = loads_of()
    other, selection = take(loads, 7, PREFILL, DECODE), take(loads, 100, PREFILL, DECODE)
    selection.first_token()
    assert loads.by_worker == {PREFILL: WorkerLoad(1, 1, 7), DECODE: WorkerLoad(2, 1, 0)}
    assert selection.release()
    assert loads.by_worker == {PREFILL: WorkerLoad(1, 1, 7), DECODE: WAITING}
    assert other.release()
    assert loads.by_worker == {} and loads.faults == 0


@pytest.mark.law("7.1")
def test_second_release_is_a_fault_and_changes_nothing() -> None:
    loads = loads_of()
    take(loads, 7, MIXED)
    selection = take(loads, 100, MIXED)
    assert selection.release()
    assert not selection.release()
    assert loads.faults == 1
    assert loads.by_worker[MIXED] == WorkerLoad(1, 1, 7)


def test_earlier_incarnation_keeps_its_own_counters() -> None:
    loads = loads_of()
    again = RouterWorker(MIXED.url, "mixed", 9)
    old = take(loads, 5, MIXED)
    take(loads, 3, again)
    assert loads.by_worker == {MIXED: WorkerLoad(1, 1, 5), again: WorkerLoad(1, 1, 3)}
    old.release()
    assert loads.by_worker == {again: WorkerLoad(1, 1, 3)}


def test_idle_callback_runs_once() -> None:
    notified: list[RouterWorker] = []
    loads = WorkerLoads(notified.append, WorkerIndices())
    first, second = take(loads, 5, MIXED), take(loads, 0, MIXED)
    first.release()
    assert notified == []
    second.first_token()
    assert notified == []
    second.release()
    assert notified == [MIXED]


def test_columns_match_workers_when_slots_are_reused() -> None:
    slots = WorkerIndices()
    loads = WorkerLoads(lambda _: None, slots)
    workers = [RouterWorker(f"http://{number}", "mixed", number) for number in range(40)]
    for number, worker in enumerate(workers):
        loads.change(worker, number + 1, number, 100 * number)
    for worker in workers[:9]:
        loads.change(worker, *(-count for count in msgspec.structs.astuple(loads.by_worker[worker])))
        slots.release(worker)
    late = [RouterWorker(f"http://late{number}", "mixed", 100 + number) for number in range(12)]
    for worker in late[6:]:
        loads.change(worker, 7, 6, 5)
    shown = loads.at(slots.among([*late, *workers[9:]])).T.tolist()
    assert shown == [
        list(msgspec.structs.astuple(loads.by_worker.get(worker, IDLE))) for worker in (*late, *workers[9:])
    ]
    assert slots.size == 43
