"""The waiting queue: requests that may be admitted, in the order of the policy, and requests that wait for an event.

    push --> ready --first, pop--> admitted
               |  ^
          park |  | wake(reason), expire
               v  |
             parked under the event that ends the wait

A parked request costs nothing until its event occurs: the completion of an operation outside steps, the end of the
computation of a prefix block, or the step that bounds the wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from fd_core.scheduling.phases import PhaseClock
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.requests import Request
from fd_core.types import Phase

WaitFor = bytes | int
"""Event that ends a wait: the key of a prefix block that a running request computes, or an operation number."""

_SLACK = 64
"""Stale entries, of requests that left, that a heap of any size may hold."""

_Entry = tuple[tuple[int, ...], int]
"""Rank and arrival."""


class _Flow(msgspec.Struct):
    """The ready requests of one flow, by rank."""

    heap: list[_Entry] = []
    """An entry, two numbers, of a request that left may stay for a while."""
    members: dict[int, Request] = {}


class WaitingQueue:
    """Requests that wait for a slot, owned by one scheduler. Each operation takes O(log n) or less, amortized."""

    def __init__(self, policy: SchedulingPolicy, times: PhaseClock) -> None:
        self._policy = policy
        self._times = times
        self.turns_move = type(policy).turn is not SchedulingPolicy.turn
        """True if the policy may change the turn of a flow on events."""
        self._flows: dict[str | None, _Flow] = {}
        """Each has an entry in `_turns`."""
        self._turns: list[tuple[int, tuple[str, ...]]] = []
        """Flows by turn, the flow without a name as (). An outdated entry moves when it reaches the top."""
        self._flow_of: dict[int, str | None] = {}
        """Flow of each ready request, by arrival."""
        self._parked: dict[WaitFor, dict[int, Request]] = {}
        self._parked_for: dict[int, tuple[WaitFor, int | None]] = {}
        """Wait reason of each parked request and the step that bounds the wait, by arrival."""
        self._deadlines: list[tuple[int, int]] = []
        """Step at which a parked request is woken at the latest, and its arrival."""

    def __len__(self) -> int:
        return len(self._flow_of) + len(self._parked_for)

    @property
    def num_parked(self) -> int:
        """Requests that wait for an event."""
        return len(self._parked_for)

    def push(self, request: Request) -> None:
        """Make a request ready; a preempted one returns to the position of its rank."""
        queued = request.queued_view or request.queued()
        request.queued_view = queued
        if request.rank is None:
            request.rank = self._policy.rank(queued)
        name = self._policy.flow(queued)
        flow = self._flows.get(name)
        if flow is None:
            if len(self._flows) == 1:  # the turn of a flow that is alone is not followed
                self._enter(*self._flows)
            flow = self._flows[name] = _Flow()
            self._enter(name)
        elif self.turns_move and len(self._flows) > 1:
            self._enter(name)
        flow.members[request.arrival] = request
        heapq.heappush(flow.heap, (request.rank, request.arrival))
        self._flow_of[request.arrival] = name
        self._times.enter(request.times, Phase.PREEMPTED if request.preemptions else None)

    def turn_changed(self, request: Request) -> None:
        """Update the turn after the policy handled an event of a request's flow; a preempted request waited in two."""
        if len(self._flows) < 2:
            return
        queued = request.queued()
        names = {self._policy.flow(queued)}
        if queued.preempted:
            names.add(self._policy.flow(replace(queued, preempted=False)))
        for name in names:
            if name in self._flows:
                self._enter(name)

    def first(self) -> Request | None:
        """Return the ready request that is admitted next, or None."""
        while self._flow_of:
            turn, named = self._turns[0]
            name = named[0] if named else None
            flow = self._flows.get(name)
            while flow and flow.heap and flow.heap[0][1] not in flow.members:
                heapq.heappop(flow.heap)
            followed = self.turns_move and len(self._flows) > 1
            if flow and flow.heap and (not followed or turn == self._policy.turn(name)):
                return flow.members[flow.heap[0][1]]
            heapq.heappop(self._turns)
            if flow and flow.heap:
                self._enter(name)
            else:
                self._flows.pop(name, None)
        return None

    def remove(self, request: Request) -> None:
        """Remove a request, ready or parked."""
        arrival, request.queued_view = request.arrival, None
        if arrival in self._flow_of:
            flow = self._flows[self._flow_of.pop(arrival)]
            del flow.members[arrival]
            if len(flow.heap) > 2 * len(flow.members) + _SLACK:
                flow.heap = [entry for entry in flow.heap if entry[1] in flow.members]
                heapq.heapify(flow.heap)
            return
        parked = self._parked_for.pop(arrival, None)
        if parked is not None:
            waits_for, _ = parked
            others = self._parked[waits_for]
            del others[arrival]
            if not others:
                del self._parked[waits_for]

    def park(self, request: Request, waits_for: WaitFor, until_step: int | None = None) -> None:
        """Set a request aside, new or ready, until `wake(waits_for)`, or until step `until_step` at the latest."""
        self.remove(request)
        self._parked.setdefault(waits_for, {})[request.arrival] = request
        self._parked_for[request.arrival] = waits_for, until_step
        phase = Phase.GRAMMAR if waits_for == request.compiling else Phase.STORE
        if isinstance(waits_for, bytes):
            phase = Phase.PREFIX
        self._times.enter(request.times, Phase.PREEMPTED if request.preemptions else phase)
        if until_step is not None:
            heapq.heappush(self._deadlines, (until_step, request.arrival))

    def wake(self, waits_for: WaitFor) -> None:
        """Make the requests ready that wait for the event `waits_for`."""
        woken = self._parked.pop(waits_for, None)
        if woken is not None:
            for arrival, request in woken.items():
                del self._parked_for[arrival]
                self.push(request)

    def expire(self, step: int) -> list[Request]:
        """Make the requests ready that have waited until `step`, and return them."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= step:
            until_step, arrival = heapq.heappop(self._deadlines)
            waits_for, until = self._parked_for.get(arrival, (0, None))
            if until == until_step:
                request = self._parked[waits_for][arrival]
                self.remove(request)
                self.push(request)
                expired.append(request)
        return expired

    def _enter(self, name: str | None) -> None:
        """Record the current turn of the flow."""
        names: Iterable[str | None] = (name,)
        if len(self._turns) > 4 * len(self._flows) + _SLACK:
            self._turns, names = [], self._flows
        for each in names:
            heapq.heappush(self._turns, (self._policy.turn(each), () if each is None else (each,)))
