"""Virtual loops: jobs take virtual time, and completions are delivered when the job that produced them ends."""

from __future__ import annotations

import math

import pytest

from fd_core.effects.operations import Sent
from fd_core.effects.port import CompletionQueue
from fd_core.simulation.clock.timeline import Timeline
from fd_core.simulation.clock.virtual_loop import VirtualCompletions, VirtualLoop, VirtualThreads


class Bench:
    """Process with two loops and a log of (event, time)."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.threads = VirtualThreads(self.timeline)
        self.log: list[tuple[str, float]] = []
        self.one, self.other = self.loop(), self.loop()

    def loop(self, *turn_and_end) -> VirtualLoop:
        loop = self.threads.make_loop("a loop", *turn_and_end)
        loop.start()
        return loop

    def job(self, name: str, seconds: float, then=lambda: None):
        def do() -> None:
            self.log.append((name, self.threads.clock()))
            self.threads.spend(seconds)
            then()

        return do


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_jobs_of_a_loop_run_in_sequence(bench) -> None:
    for name in "abc":
        bench.one.post(bench.job(name, 2.0))
    bench.other.post(bench.job("bystander", 1.0))
    bench.timeline.run()
    assert sorted(bench.log) == [("a", 0.0), ("b", 2.0), ("bystander", 0.0), ("c", 4.0)]


def test_job_posted_by_a_job_starts_at_its_end(bench) -> None:
    later = bench.job("later", 0.0)
    bench.one.post(bench.job("first", 5.0, lambda: bench.other.post(later)))
    bench.timeline.at(3.0, lambda: bench.other.post(bench.job("sooner", 0.0)))
    bench.timeline.run()
    assert bench.log == [("first", 0.0), ("sooner", 3.0), ("later", 5.0)]


def test_completion_is_delivered_when_its_job_ends(bench) -> None:
    queue = CompletionQueue(lambda: bench.log.append(("woken", bench.timeline.now)))
    mine = VirtualCompletions(bench.threads, queue)
    bench.one.post(bench.job("copy", 4.0, lambda: mine.put(Sent(1))))
    bench.timeline.run(3.0)
    assert mine.take() == []
    bench.timeline.run()
    assert bench.log == [("copy", 0.0), ("woken", 4.0)] and mine.take() == [Sent(1)]


def test_cancelled_operation_completes_after_current_copy(bench) -> None:
    queue = CompletionQueue(lambda: bench.log.append(("woken", bench.timeline.now)))
    completions = VirtualCompletions(bench.threads, queue)
    bench.one.post(lambda: bench.threads.copy(3.0))
    for when in (1.0, 4.0):
        bench.timeline.at(when, lambda: completions.put(Sent(1)))
        bench.timeline.run(when + 2.5)
        queue.take()
    assert bench.log == [("woken", 3.0), ("woken", 4.0)]


def test_blocking_wait_for_completion_is_an_error(bench) -> None:
    with pytest.raises(RuntimeError, match="virtual clock"):
        VirtualCompletions(bench.threads, CompletionQueue()).wait(1.0)


def test_turn_runs_at_requested_time_after_jobs(bench) -> None:
    pauses = iter([1.0, 0.5, math.inf, math.inf])

    def turn() -> float:
        bench.log.append(("turn", bench.threads.clock()))
        return next(pauses)

    loop = bench.loop(turn)
    bench.timeline.run(3.0)
    loop.post(bench.job("a", 2.0))
    bench.timeline.run()
    assert bench.log == [("turn", 0.0), ("turn", 1.0), ("turn", 1.5), ("a", 3.0), ("turn", 5.0)]


def test_stopping_loop_drains_jobs_and_ends_once(bench) -> None:
    loop = bench.loop(lambda: math.inf, lambda: bench.log.append(("end", bench.threads.clock())))
    loop.post(bench.job("a", 1.0))
    loop.post(bench.job("b", 1.0))
    loop.stop()
    assert not loop.post(bench.job("c", 1.0))
    bench.timeline.run()
    assert bench.log == [("a", 0.0), ("b", 1.0), ("end", 2.0)] and loop.join(0.0)


def test_join_runs_jobs_that_fit_its_timeout(bench) -> None:
    for name in "abc":
        bench.one.post(bench.job(name, 2.0))
    bench.one.stop()
    assert not bench.one.join(3.0) and bench.log == [("a", 0.0), ("b", 2.0)]
    assert bench.one.join(5.0) and bench.log[2:] == [("c", 4.0)]
    bench.timeline.run()
    assert len(bench.log) == 3


def test_killed_process_delivers_nothing(bench) -> None:
    queue = CompletionQueue()
    bench.one.post(bench.job("copy", 4.0, lambda: VirtualCompletions(bench.threads, queue).put(Sent(1))))
    bench.one.post(bench.job("next", 1.0))
    bench.timeline.at(2.0, bench.threads.kill)
    bench.timeline.run()
    assert bench.log == [("copy", 0.0)] and queue.take() == []
    assert not bench.one.post(bench.job("more", 1.0)) and bench.one.join(1.0)


def test_job_error_ends_the_run(bench) -> None:
    bench.one.post(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        bench.timeline.run()
