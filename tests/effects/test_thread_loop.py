"""Thread loop: jobs in FIFO order, turns when due, messages after earlier jobs, and an orderly stop."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from fd_core.effects.thread_loop import ThreadLoop


def test_jobs_run_in_order_and_stop_runs_last() -> None:
    done: list[object] = []
    loop = ThreadLoop("fdcore-test", end=lambda: done.append("end"))
    loop.post(lambda: done.append("before the start"))
    loop.start()
    for number in range(100):
        assert loop.post(lambda number=number: done.append(number))
    loop.stop()
    assert not loop.post(lambda: done.append("late"))
    assert loop.join(60) and not loop._thread.is_alive()
    assert done == ["before the start", *range(100), "end"]


def test_posting_a_job_wakes_the_thread() -> None:
    loop = ThreadLoop("fdcore-test")
    loop.start()
    time.sleep(0.05)
    done = threading.Event()
    loop.post(done.set)
    assert done.wait(60)
    loop.stop()
    assert loop.join(60)


def test_turn_runs_when_due() -> None:
    turns: list[float] = []
    enough = threading.Event()

    def turn() -> float:
        turns.append(time.monotonic())
        if len(turns) == 5:
            enough.set()
        return 0.05

    loop = ThreadLoop("fdcore-test", turn)
    loop.start()
    assert enough.wait(60)
    loop.stop()
    assert loop.join(60)
    assert min(later - earlier for earlier, later in itertools.pairwise(turns)) >= 0.04


def test_jobs_run_between_busy_turns() -> None:
    loop = ThreadLoop("fdcore-test", lambda: 0.0)
    loop.start()
    done = threading.Event()
    loop.post(done.set)
    assert done.wait(60)
    loop.stop()
    assert loop.join(60)


def test_failed_job_is_logged_and_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))
    done = threading.Event()
    loop = ThreadLoop("fdcore-test")
    loop.start()
    loop.post(lambda: [][0])
    loop.post(done.set)
    assert done.wait(60)
    loop.stop()
    assert loop.join(60)
    assert shown == [IndexError]


def test_finished_job_keeps_no_references() -> None:
    class Array:
        pass

    array = Array()
    freed = threading.Event()
    weakref.finalize(array, freed.set)
    loop = ThreadLoop("fdcore-test")
    loop.start()
    loop.post(lambda held=array: None)
    del array
    assert freed.wait(60)
    loop.stop()
    assert loop.join(60)


@contextmanager
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    try:
        here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        port = here.bind_to_random_port("tcp://127.0.0.1")
        there.connect(f"tcp://127.0.0.1:{port}")
        yield here, there
        there.close(0)
    finally:
        context.term()


def test_messages_of_watched_socket_are_handled() -> None:
    with sockets() as (here, there):
        received: list[bytes] = []
        arrived = threading.Event()

        def handle(frames: list[zmq.Frame]) -> None:
            received.append(frames[0].bytes)
            arrived.set()

        loop = ThreadLoop("fdcore-test", end=lambda: (loop.forget(here), here.close(0)))
        loop.watch(here, handle)
        loop.start()
        there.send(b"word")
        assert arrived.wait(60)
        loop.stop()
        assert loop.join(60)
        assert received == [b"word"]


@pytest.mark.parametrize("busy", ["job", "handler"])
def test_message_is_handled_after_jobs_posted_before_it_was_sent(busy: str) -> None:
    done: list[str] = []
    started, go_on, handled = threading.Event(), threading.Event(), threading.Event()

    def handle(frames: list[zmq.Frame]) -> None:
        done.append(frames[0].bytes.decode())
        if done == ["first"] and busy == "handler":
            started.set()
            go_on.wait(60)
        if done[-1] == "last":
            handled.set()

    with sockets() as (here, there):
        loop = ThreadLoop("fdcore-test", end=lambda: (loop.forget(here), here.close(0)))
        loop.watch(here, handle)
        loop.start()
        if busy == "job":
            loop.post(lambda: (started.set(), go_on.wait(60)))
        else:
            there.send(b"first")
        assert started.wait(60)
        loop.post(lambda: done.append("posted"))
        there.send(b"last")
        time.sleep(0.05)  # for the message to arrive, else a loop that handles it too early may pass
        go_on.set()
        assert handled.wait(60)
        loop.stop()
        assert loop.join(60)
    assert done[-2:] == ["posted", "last"]


def test_messages_of_forgotten_socket_are_not_handled() -> None:
    received: list[bytes] = []

    def handle(frames: list[zmq.Frame]) -> None:
        received.append(frames[0].bytes)
        loop.forget(here)
        here.close(0)
        loop.stop()

    with sockets() as (here, there):
        loop = ThreadLoop("fdcore-test")
        for word in (b"one", b"two", b"three"):
            there.send(word)
        assert here.poll(60_000)
        loop.watch(here, handle)
        loop.start()
        assert loop.join(60)
    assert received == [b"one"]


def test_unstarted_loop_runs_single_jobs_on_request() -> None:
    done: list[int] = []
    loop = ThreadLoop("fdcore-test")
    loop.post(lambda: done.append(1))
    loop.post(lambda: done.append(2))
    assert loop.run_one() and done == [1]
    assert loop.run_one() and not loop.run_one()
    assert done == [1, 2] and loop.join(0)
