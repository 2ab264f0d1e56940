"""Comparison of what a scheduler shows its policies, and how often it asks them, with the audited requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.requests import QueuedRequest
from fd_core.scheduling.victims import RunningRequests, VictimPolicy
from fd_core.testing.kit.law import broken, require
from fd_core.testing.schedulers.audit import Auditor, Followed
from fd_core.types import StepPlan


class _PolicyCall(NamedTuple):
    """A call of a policy; its first argument is a `QueuedRequest` or `RunningRequests`."""

    name: str
    arguments: Sequence[Any]
    value: Any


class _RecordedPolicy:
    """A policy whose calls are recorded, except those of `turn`. Its copy, for a second scheduler, is that policy's."""

    turn: Any = SchedulingPolicy.turn

    def __init__(self, policy: Any, calls: list[_PolicyCall]) -> None:
        self._policy, self._calls = policy, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._policy, name)
        return partial(self._call, name, found) if callable(found) else found

    def _call(self, name: str, method: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        try:
            value = method(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - a policy may raise anything
            shown = ", ".join(map(str, (*arguments, *named.values())))
            broken("8", f"the policy raises {error!r} in `{name}` of {shown}")
        self._calls.append(_PolicyCall(name, (*arguments, *named.values()), value))
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self._policy, memo)


class _PolicyWithTurns(_RecordedPolicy):
    def turn(self, flow: str | None) -> int:
        try:
            turn: int = self._policy.turn(flow)
        except Exception as error:  # noqa: BLE001
            broken("8", f"the policy raises {error!r} in `turn` of {flow!r}")
        return turn


class PolicyAuditor:
    """Auditor of the calls of both policies of a scheduler."""

    def __init__(self, policy: SchedulingPolicy, victims: VictimPolicy, auditor: Auditor) -> None:
        self._calls: list[_PolicyCall] = []
        turns = type(policy).turn is not SchedulingPolicy.turn
        self.policy: Any = (_PolicyWithTurns if turns else _RecordedPolicy)(policy, self._calls)
        self.victims: Any = _RecordedPolicy(victims, self._calls)
        self._auditor = auditor
        self._events: dict[int, list[str]] = {}
        """Names of the calls about each request, except `flow`."""
        self._placed: dict[int, QueuedRequest] = {}
        """View of each request in the last question for its flow."""
        self._candidates: set[int] = set()
        """Arrivals of the candidates that the policy named last."""
        self._entering: set[str] = set()
        """Requests that the last plan admitted."""
        self._chosen: set[int] = set()
        """Arrivals of requests that the last plan may preempt: chosen ones, and those without an alternative."""

    def check(self) -> None:
        """Compare the calls since the last check with the requests as they are now."""
        calls, self._calls[:] = self._calls[:], []
        for number, (name, (shown, *more), value) in enumerate(calls):
            if name == "choose" and [each.name for each in calls[number + 1 : number + 2]] == ["displaced_by"]:
                continue  # the scheduling policy asked
            if isinstance(shown, RunningRequests):
                self._check_running(name, shown, value)
            elif name == "displaced_by":
                self._check_queued(name, shown)
                self._check_running(name, more[0], [] if value is None else [value])
            else:
                self._check_queued(name, shown, *more)

    def planned(self, plan: StepPlan | None) -> None:
        """Compare the calls of a plan with the requests before it."""
        self._entering = set() if plan is None else {each.request_id for each in plan.admissions}
        self._chosen.clear()
        self._auditor.displaced.clear()
        self.check()

    def check_victim(self, victim: Followed) -> None:
        """Check that a request that the last plan preempted was chosen."""
        chosen = victim.arrival in self._chosen
        require(chosen, "8", f"{victim.name} was preempted, which the victim policy did not choose")

    def _request(self, arrival: int, what: str) -> Followed:
        arrived = self._auditor.arrivals
        if not 0 <= arrival < len(arrived):
            broken("8", f"{what} was shown arrival {arrival}, but {len(arrived)} requests arrived")
        return arrived[arrival]

    def _check_queued(self, name: str, shown: QueuedRequest, used: int | None = None) -> None:
        request, events = self._request(shown.arrival, name), self._events.setdefault(shown.arrival, [])
        # The flow in which a preempted request waited before may be asked for as well.
        right = request.queued(preempted=request.preempted and (shown.preempted or name != "flow"))
        require(shown == right, "8", f"`{name}` was shown {shown} of {request.name}, expected {right}")
        if name == "flow" and shown.preempted == request.preempted:
            self._placed[shown.arrival] = shown
        if name in ("flow", "displaced_by"):
            return
        events.append(name)
        what = f"{request.name} used {right.num_tokens} tokens, but the policy got {used}"
        require(used in (None, right.num_tokens), "8", what)
        if name == "admitted":
            placed = self._placed.get(shown.arrival)
            what = f"{request.name} was admitted as {shown}, but the policy was asked for the flow of {placed}"
            require(placed == shown, "8", what)
        if name in ("rank", "admitted"):
            count = events.count("rank")
            require(count == 1, "8", f"the policy was asked for the rank of {request.name} {count} times")

    def _check_running(self, name: str, shown: RunningRequests, value: Any) -> None:
        arrivals: list[int] = shown.arrivals.tolist()
        distinct = len({*arrivals}) == len({*shown.slots.tolist()}) == len(arrivals) > 0
        require(distinct, "8", f"`{name}` was shown slots {shown.slots} of arrivals {shown.arrivals}")
        for row, arrival in enumerate(arrivals):
            request = self._request(arrival, name)
            occupancy, size = request.occupancy, len(request.tokens)
            runs = not occupancy.revoked if occupancy else request.name in self._entering
            require(runs, "8", f"`{name}` was shown {request.name}, which does not run")
            gained, planned = (size - occupancy.entered, occupancy.num_planned) if occupancy else (0, size)
            for field, right in (
                ("priorities", range(request.spec.priority, request.spec.priority + 1)),
                ("num_tokens", range(size, planned + 1)),  # steps in flight may add some
                ("num_gained", range(gained, gained + 1)),
                ("preempted_before", range(request.preempted, request.preempted + 1)),
            ):
                found = int(getattr(shown, field)[row])
                what = f"`{name}` was shown {field}={found} of {request.name}, expected {right.start} to {right[-1]}"
                require(found in right, "8", what)
        expected = self._auditor.limits.block_size
        require(shown.block_size == expected, "8", f"`{name}` was shown blocks of {shown.block_size}, not {expected}")
        if name == "choose":
            given, rest = self._candidates, self._candidates - self._chosen
            what = f"the victim policy is offered arrivals {arrivals}, of which the scheduling policy allows {given}"
            # A scheduler that asks the policy nothing at all is found by the order of its admissions.
            require({*arrivals} in (given, rest) or not self._events, "8", what)
            self._chosen.add(arrivals[value])
            return
        growing = {
            each.request.arrival
            for each in self._auditor.live
            if each.num_planned < each.request.limit and not each.request.abort_requested
        }
        missing = growing - self._chosen - {*arrivals}
        require(not missing, "8", f"`{name}` was not shown arrivals {missing}, which run")
        named = {arrivals[int(row)] for row in value}
        if name == "displaced_by":
            self._auditor.displaced |= named
            self._chosen |= named
            return
        self._candidates = named
        if len(self._candidates) == 1:
            self._chosen |= self._candidates

    def check_ended(self, admitted: Counter[str]) -> None:
        """Check the calls about all requests, which have ended after so many admissions of each, by name."""
        for arrival, request in enumerate(self._auditor.arrivals):
            events = [name for name in self._events.get(arrival, []) if name != "rank"]
            count = events.count("admitted")
            once = events == ["arrived", *["admitted"] * count, "ended"]
            # A request that was aborted while it loaded was admitted to a slot, but the runner was not notified.
            what = f"{request.name} was admitted {admitted[request.name]} times; the policy got {events}"
            require(once and count >= admitted[request.name], "8", what)
