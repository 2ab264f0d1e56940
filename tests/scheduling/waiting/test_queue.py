"""The waiting queue compared with a model that scans all requests."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fd_core.scheduling.phases import PhaseClock
from fd_core.scheduling.policies import Fcfs, SchedulingPolicy
from fd_core.scheduling.requests import QueuedRequest, Request
from fd_core.scheduling.waiting.queue import WaitFor, WaitingQueue
from fd_core.types import RequestSpec, SamplingParams

FLOWS = st.sampled_from(["", "a", "b", "c"])
REASONS = st.sampled_from([b"k1", b"k2", 1, 2])


def request(arrival: int, flow: str = "", priority: int = 0) -> Request:
    spec = RequestSpec(
        request_id=str(arrival),
        prompt=(1,),
        params=SamplingParams(max_tokens=8),
        tenant=flow,
        priority=priority,
    )
    return Request(spec, arrival, 100, b"")


@dataclass
class Turns(SchedulingPolicy):
    """Policy whose flows have scripted turns; preempted requests wait in a flow without a name."""

    name = "turns"
    of: dict[str | None, int] = field(default_factory=dict)

    def rank(self, request: QueuedRequest) -> tuple[int, ...]:
        return (request.priority, request.arrival)

    def flow(self, request: QueuedRequest) -> str | None:
        return None if request.preempted else request.tenant

    def turn(self, flow: str | None) -> int:
        return self.of.get(flow, 0)


class QueueMachine(RuleBasedStateMachine):
    """In any order of events the queue agrees with a scan of all requests."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Turns()
        self.queue = WaitingQueue(self.policy, PhaseClock(None))
        self.ready: dict[int, tuple[Request, str | None]] = {}
        """Ready requests, with the flow that each had when it became ready."""
        self.parked: dict[int, tuple[Request, WaitFor, int | None]] = {}
        self.removed: list[Request] = []
        self.step = 0

    def _make_ready(self, request: Request) -> None:
        self.ready[request.arrival] = request, self.policy.flow(request.queued())

    def _first(self) -> Request | None:
        def sort_key(entry: tuple[Request, str | None]) -> tuple[object, ...]:
            request, flow = entry
            return self.policy.turn(flow), () if flow is None else (flow,), request.rank

        return min(self.ready.values(), key=sort_key)[0] if self.ready else None

    def _any(self, data: st.DataObject) -> Request:
        here = [*(request for request, _ in self.ready.values()), *(entry[0] for entry in self.parked.values())]
        return data.draw(st.sampled_from(here))

    @rule(flow=FLOWS, priority=st.integers(0, 2), turn=st.none() | st.integers(-3, 3))
    def arrive(self, flow: str, priority: int, turn: int | None) -> None:
        """A new request arrives and may change the turn of its flow either way."""
        if turn is not None:
            self.policy.of[flow] = turn
        made = request(len(self.ready) + len(self.parked) + len(self.removed), flow, priority)
        self.queue.push(made)
        self._make_ready(made)

    @precondition(lambda self: self.ready)
    @rule(turn=st.none() | st.integers(-3, 3))
    def admit(self, turn: int | None) -> None:
        first = self.queue.first()
        assert first is not None
        self.queue.remove(first)
        del self.ready[first.arrival]
        self.removed.append(first)
        self._turn(first, turn)

    @precondition(lambda self: self.ready or self.parked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        left = self._any(data)
        self.queue.remove(left)
        self.ready.pop(left.arrival, None)
        self.parked.pop(left.arrival, None)
        self.removed.append(left)

    @precondition(lambda self: self.removed)
    @rule(data=st.data())
    def return_preempted(self, data: st.DataObject) -> None:
        back = data.draw(st.sampled_from(self.removed))
        self.removed.remove(back)
        back.preemptions = 1
        self.queue.push(back)
        self._make_ready(back)

    @precondition(lambda self: self.removed)
    @rule(data=st.data(), turn=st.integers(-3, 3))
    def end(self, data: st.DataObject, turn: int) -> None:
        self._turn(data.draw(st.sampled_from(self.removed)), turn)

    def _turn(self, seen: Request, turn: int | None) -> None:
        """The policy observes a request and changes the turn of the flow in which it first waited."""
        if turn is not None:
            self.policy.of[seen.spec.tenant] = turn
        self.queue.turn_changed(seen)

    @precondition(lambda self: self.ready or self.parked)
    @rule(data=st.data(), reason=REASONS, steps=st.none() | st.integers(0, 5))
    def park(self, data: st.DataObject, reason: WaitFor, steps: int | None) -> None:
        aside = self._any(data)
        until = None if steps is None else self.step + steps
        self.queue.park(aside, reason, until)
        self.ready.pop(aside.arrival, None)
        self.parked[aside.arrival] = aside, reason, until

    @rule(reason=REASONS)
    def wake(self, reason: WaitFor) -> None:
        self.queue.wake(reason)
        for aside, waits_for, _ in list(self.parked.values()):
            if waits_for == reason:
                del self.parked[aside.arrival]
                self._make_ready(aside)

    @rule(steps=st.integers(0, 3))
    def expire(self, steps: int) -> None:
        self.step += steps
        expired = {aside.arrival for aside in self.queue.expire(self.step)}
        late = {arrival for arrival, (_, _, until) in self.parked.items() if until is not None and until <= self.step}
        assert expired == late
        for arrival in late:
            self._make_ready(self.parked.pop(arrival)[0])

    @invariant()
    def agrees_with_model(self) -> None:
        assert self.queue.first() is self._first()
        assert len(self.queue) == len(self.ready) + len(self.parked)
        assert self.queue.num_parked == len(self.parked)


TestQueue = QueueMachine.TestCase
TestQueue.settings = TestQueue.settings.__class__(max_examples=60, stateful_step_count=50, deadline=None)


def test_thousand_requests_leave_in_order() -> None:
    queue = WaitingQueue(Fcfs(), PhaseClock(None))
    requests = [request(arrival) for arrival in range(1000)]
    for one in requests:
        queue.push(one)
    for one in requests[::2]:
        queue.remove(one)
    order = []
    while (first := queue.first()) is not None:
        queue.remove(first)
        order.append(first.arrival)
    assert order == list(range(1, 1000, 2))


@pytest.mark.parametrize("reason", [None, b"key", 7])
def test_removed_request_leaves_no_state(reason: WaitFor | None) -> None:
    queue = WaitingQueue(Fcfs(), PhaseClock(None))
    for arrival in range(100):
        queue.push(request(arrival))
    left = request(100)
    tokens = weakref.ref(left.tokens._data)
    queue.push(left)
    if reason is not None:
        queue.park(left, reason, 1000)
    queue.remove(left)
    del left
    gc.collect()
    assert tokens() is None
    assert len(queue) == 100


def test_state_does_not_grow_with_past_requests() -> None:
    """The record of removed requests does not grow with their number."""
    policy = Turns()
    queue = WaitingQueue(policy, PhaseClock(None))
    queue.push(request(0, "a"))
    for arrival in range(1, 5000):
        one = request(arrival, str(arrival))
        queue.push(one)
        if arrival % 2:
            queue.park(one, b"key")
        queue.turn_changed(one)
        queue.remove(one)
        queue.first()
    assert len(queue._turns) < 500
    assert len(queue._flows) < 500
    assert not queue._parked
    assert not queue._parked_for
