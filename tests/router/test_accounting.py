"""Guards give back what they hold, once; nothing else writes a counter."""

from __future__ import annotations

from fd_core.router.accounting import IDLE, Ledger, Load
from fd_core.router.workers import Worker

MIXED = Worker("http://a", "mixed", 1)
PREFILL = Worker("http://p", "prefill", 2)


def test_the_first_token_gives_back_the_prefill_tokens_and_the_end_the_rest() -> None:
    ledger = Ledger()
    guard = ledger.take(MIXED, 100)
    assert ledger.load(MIXED) == guard.held == Load(1, 1, 100)
    guard.first_token()
    guard.first_token()
    assert ledger.load(MIXED) == guard.held == Load(1, 0, 0)
    assert guard.release()
    assert ledger.load(MIXED) == guard.held == IDLE
    assert ledger.loads() == {}


def test_what_ends_before_its_first_token_gives_back_its_prefill_tokens_as_well() -> None:
    ledger = Ledger()
    ledger.take(MIXED, 100).release()
    assert ledger.loads() == {}


def test_the_prefill_side_ends_at_the_first_token() -> None:
    ledger = Ledger()
    guard = ledger.take(PREFILL, 100, ends_at_first_token=True)
    guard.first_token()
    assert guard.released and ledger.loads() == {}
    guard.first_token()
    assert ledger.faults == 0


def test_a_second_release_is_a_fault_and_changes_nothing() -> None:
    ledger = Ledger()
    other, guard = ledger.take(MIXED, 7), ledger.take(MIXED, 100)
    assert guard.release()
    assert not guard.release()
    assert ledger.faults == 1
    assert ledger.load(MIXED) == other.held == Load(1, 1, 7)


def test_an_earlier_incarnation_keeps_its_own_counters() -> None:
    ledger = Ledger()
    again = Worker(MIXED.url, "mixed", 9)
    old, new = ledger.take(MIXED, 5), ledger.take(again, 3)
    assert (ledger.load(MIXED), ledger.load(again)) == (old.held, new.held)
    old.release()
    assert (ledger.load(MIXED), ledger.load(again)) == (IDLE, Load(1, 1, 3))


def test_idle_workers_are_told_of_once() -> None:
    told: list[Worker] = []
    ledger = Ledger(told.append)
    first, second = ledger.take(MIXED, 5), ledger.take(MIXED, 0)
    first.release()
    assert told == []
    second.first_token()
    assert told == []
    second.release()
    assert told == [MIXED]
