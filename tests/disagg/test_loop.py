"""The thread does what is posted, survives it, and ends."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from fd_core.disagg.loop import Loop


def test_jobs_are_done_in_order_and_the_end_comes_last() -> None:
    done: list[object] = []
    loop = Loop("fdcore-test", lambda: 60.0, lambda: done.append("end"))
    loop.start()
    for number in range(100):
        assert loop.post(lambda number=number: done.append(number))
    loop.stop()
    assert not loop.post(lambda: done.append("late"))
    assert loop.join(10)
    assert done == [*range(100), "end"]


def test_a_turn_comes_when_it_is_due() -> None:
    turns: list[float] = []

    def turn() -> float:
        turns.append(time.monotonic())
        return 0.05

    loop = Loop("fdcore-test", turn, lambda: None)
    loop.start()
    time.sleep(0.5)
    loop.stop()
    assert loop.join(10)
    assert 3 <= len(turns) <= 12
    assert min(later - earlier for earlier, later in itertools.pairwise(turns)) >= 0.04


def test_a_failed_job_is_shown_and_the_next_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))
    done = threading.Event()
    loop = Loop("fdcore-test", lambda: 1.0, lambda: None)
    loop.start()
    loop.post(lambda: [][0])
    loop.post(done.set)
    assert done.wait(10)
    loop.stop()
    assert loop.join(10)
    assert shown == [IndexError]
