"""Threads under the virtual clock: their jobs are events, and the time of a job delays its own loop only.

A job runs as a whole at its start time. Its clock runs ahead of the shared one as it spends time: its messages
reach others when their clocks show the same time, and the next job of its loop starts no earlier. So a job
cannot be interrupted while it copies or calls a store; production's can, between two blocks. An operation that another
party ends meanwhile is completed after the copy, as in production.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from fd_core.effects.operations import Completion
from fd_core.effects.port import CompletionQueue
from fd_core.effects.thread_loop import Job, ThreadLoop
from fd_core.simulation.clock.timeline import ScheduledEvent, Timeline


class VirtualThreads:
    """Threads of one simulated process, and the clock that they and its engine read."""

    def __init__(self, timeline: Timeline) -> None:
        self.alive = True
        self._copies_until = 0.0
        self._timeline = timeline
        self._ahead: float | None = None
        """Time of the running job; None if none runs."""
        self._at_end: list[Callable[[], None]] = []
        self._work: Callable[[float], float] | None = None

    def share(self, work: Callable[[float], float]) -> None:
        """Report processor seconds of jobs to `work` from here on; it returns how long they take."""
        self._work = work

    def clock(self) -> float:
        """Return the caller's time in seconds: that of the running job, or of the engine."""
        return self._timeline.now if self._ahead is None else self._ahead

    @property
    def ahead(self) -> float:
        """Seconds that the running job has taken so far."""
        return self.clock() - self._timeline.now

    @property
    def copying(self) -> float:
        """Seconds until the copies in progress are over; 0 for a job, which does not wait for its own."""
        return max(0.0, self._copies_until - self._timeline.now) if self._ahead is None else 0.0

    def copy(self, seconds: float) -> None:
        """Account for the time of a copy of KV blocks, see `spend`."""
        self.spend(seconds)
        self._copies_until = max(self._copies_until, self.clock())

    def spend(self, seconds: float, *, waits: bool = False) -> None:
        """Spend time of the running job, if one runs: processor time unless it `waits` for an external event."""
        if self._ahead is not None:
            self._ahead += seconds if waits or self._work is None else self._work(seconds)

    def spend_on_step_cpu(self, seconds: float) -> None:
        """Spend time of the processor that computes steps, if it is the only one; otherwise nothing is delayed."""
        if self._work is not None:
            self.spend(seconds)

    def post_to_caller(self, call: Job, seconds: float = 0.0) -> None:
        """Schedule `call` `seconds` after the caller's time, unless the process was killed."""
        if self._ahead is None and not seconds:
            call()
        else:
            self._timeline.at(self.clock() + seconds, lambda: self._reach(call))

    def kill(self) -> None:
        """End the process: pending jobs are dropped, operations in progress never complete."""
        if self.alive:
            self.alive = False
            for call in self._at_end:
                call()

    def at_end(self, call: Callable[[], None]) -> None:
        """Register `call` to run when the process is killed."""
        self._at_end.append(call)

    def make_loop(self, name: str, turn: Callable[[], float] | None = None, end: Job | None = None, /) -> VirtualLoop:
        """Return a loop of this process that is not started, as `ThreadLoop` makes it."""
        return VirtualLoop(self, self._timeline, turn, end=end)

    def run(self, when: float, work: Callable[[], None]) -> float:
        """Run part of a loop's work from time `when`; return its end time."""
        if self._ahead is not None:
            raise RuntimeError("a job of a simulated thread runs within another")
        self._ahead = when
        try:
            work()
            return self._ahead
        finally:
            self._ahead = None

    def _reach(self, call: Job) -> None:
        if self.alive:
            call()


class VirtualLoop(ThreadLoop):
    """One thread: a job starts once it was posted and the previous one is over. An exception ends the run."""

    def __init__(
        self, threads: VirtualThreads, timeline: Timeline, turn: Callable[[], float] | None, end: Job | None
    ) -> None:
        self._threads = threads
        self._timeline = timeline
        self._turn = turn
        self._end = end
        self._queue: list[tuple[float, int, Job]] = []
        """Jobs with their post times; a heap, because clocks of loops differ."""
        self._count = 0
        self._free = 0.0
        """End time of the last work."""
        self._due = math.inf
        """Time at which `turn` is due again."""
        self._state = "new"
        self._stopping = False
        self._next: ScheduledEvent | None = None

    def start(self) -> None:
        """Start the loop."""
        self._state = "idle"
        self._free = self._due = self._threads.clock()
        self._book()

    def post(self, job: Job) -> bool:
        """Queue `job` for the caller's time, or later."""
        if self._stopping or not self._threads.alive:
            return False
        heapq.heappush(self._queue, (self._threads.clock(), self._count, job))
        self._count += 1
        self._book()
        return True

    def stop(self) -> None:
        """End after the queued jobs."""
        self._stopping = True
        self._book()

    def join(self, seconds: float) -> bool:
        """Run at once the jobs due within `seconds`; the caller's clock stands still meanwhile."""
        until = self._threads.clock() + seconds
        while self._threads.alive and self._state == "idle" and self._stopping and (when := self._when()) <= until:
            self._work(when)
        return self._state != "idle" or not self._threads.alive

    def _when(self) -> float:
        if self._queue:
            return max(self._free, min(self._queue[0][0], self._due))
        return self._free if self._stopping else max(self._free, self._due)

    def _book(self) -> None:
        if self._state != "idle":
            return
        when = self._when()
        if self._next is not None:
            if self._next.when <= when:
                return
            self._next.cancel()
        self._next = None if when == math.inf else self._timeline.at(when, self._keep)

    def _keep(self) -> None:
        self._next = None
        if self._threads.alive and self._state == "idle":
            if self._when() <= self._timeline.now:
                self._work(self._timeline.now)
            self._book()

    def _work(self, when: float) -> None:
        """Run the next job and, unless another is due, the work between jobs."""
        self._state = "busy"
        self._free = self._threads.run(when, lambda: self._do_next(when))
        if self._state == "busy":
            self._state = "idle"

    def _do_next(self, when: float) -> None:
        if self._queue and self._queue[0][0] <= when:
            heapq.heappop(self._queue)[2]()
        if not (self._queue and self._queue[0][0] <= self._threads.clock()):
            pause = math.inf if self._turn is None else self._turn()
            self._due = self._threads.clock() + max(0.0, pause)
            if self._stopping and not self._queue:
                if self._end is not None:
                    self._end()
                self._state = "ended"


class VirtualCompletions(CompletionQueue):
    """Completion queue of an engine; a completion is visible once the clock shows the time of the job that put it."""

    def __init__(self, threads: VirtualThreads, queue: CompletionQueue) -> None:
        super().__init__()
        self._threads = threads
        self._engines = queue

    def put(self, completion: Completion) -> None:
        """Add a completion."""
        if self._threads.alive:
            self._threads.post_to_caller(lambda: self._engines.put(completion), self._threads.copying)

    def take(self) -> list[Completion]:
        """Return the completions since the last call."""
        return self._engines.take()

    def wait(self, seconds: float) -> None:
        """Raise: waiting would block for ever, because time advances only between events."""
        raise RuntimeError("an engine under the virtual clock must not block on completions")
