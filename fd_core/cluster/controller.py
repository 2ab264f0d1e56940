"""Decisions of a deployment: from observations of its processes to actions, without I/O and without a clock.

    STARTING --ready--> READY ---- drain ----> DRAINING --its process ended--> (gone)
        |  too late       |  unhealthy too long      |  deadline passed
        +-----------------+--------------------------+----> KILLED --its process ended--> (gone)

A process that ends while STARTING or READY died: another one is started in its place, with a longer pause after each
failure. The caller, which executes the actions, reports every process until its end, once; names are never reused.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

_OWN_FAULT: Final = (2, 3, 4)
"""Exit codes of a bad command line, a bad model and a bad plugin: the next start would fail the same way."""


@dataclass(frozen=True, slots=True)
class Supervision:
    """Timeouts and pauses of a deployment, in seconds."""

    start_seconds: float = 600.0
    """Timeout for a process to become ready."""
    unhealthy_seconds: float = 60.0
    """Time that a ready process may fail its health checks; longer than a restart of its engine takes."""
    drain_seconds: float = 45.0
    """Timeout for a draining process to end."""
    hurry_seconds: float = 5.0
    """The same, once the user is in a hurry."""
    stable_seconds: float = 30.0
    """Uptime after which the end of a process does not count as a failed start."""
    first_pause: float = 1.0
    """Pause before a start that follows a failed one; doubles with each failure."""
    longest_pause: float = 30.0
    no_capacity_pause: float = 5.0
    """Pause before the next attempt to place a process for which no node had room."""
    max_failures: int = 5
    """Failed starts in a row after which a group is given up."""
    longest_step: float = 5.0
    """Longest time between two steps; any excess does not count towards timeouts."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group of identical processes."""

    name: str
    minimum: int
    maximum: int
    is_router: bool = False


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """Exit status of a process, or the reason why it could not be started."""

    code: int | None
    """Exit code as in Python's subprocess; None if it never ran, or is unknown."""
    reason: str
    placed: bool = True
    """False if no node had room for it."""


@dataclass(frozen=True, slots=True)
class ObservedProcess:
    """Observation of one process."""

    ready: bool = False
    healthy: bool = False
    end: ProcessEnd | None = None


class ProcessPhase(enum.Enum):
    """Phase in the life of a process."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start a process of `group` under a new name."""

    name: str
    group: str


@dataclass(frozen=True, slots=True)
class DrainProcess:
    """Ask a process to drain: deregister it from the routers, then send SIGTERM. The second signal asks it to hurry."""

    name: str


@dataclass(frozen=True, slots=True)
class KillProcess:
    """End a process at once."""

    name: str


@dataclass(frozen=True, slots=True)
class ClusterNote:
    """Message for operators."""

    text: str
    bad: bool = False


ClusterAction = StartProcess | DrainProcess | KillProcess | ClusterNote


@dataclass(slots=True)
class ManagedProcess:
    """One process, from the order to start it to its end."""

    name: str
    group: str
    since: float
    phase: ProcessPhase = ProcessPhase.STARTING
    ready: bool = False
    """True if it is ready at present; one that was may be restarting its engine."""
    last_healthy: float = 0.0
    deadline: float | None = None

    @property
    def counts(self) -> bool:
        """True if it counts towards the target of its group."""
        return self.phase in (ProcessPhase.STARTING, ProcessPhase.READY)


@dataclass(slots=True)
class ManagedGroup:
    """A group, its target number of processes, and the history of its starts."""

    plan: GroupPlan
    target: int
    failures: int = 0
    failed_at: float = 0.0
    not_before: float = 0.0
    no_capacity: bool = False
    """True if the last process to be started found no room."""
    served: bool = False
    """True if one of its processes was ever ready."""
    given_up: str = ""
    starts: int = 0
    deaths: int = 0


@dataclass(slots=True)
class ClusterController:
    """Manages the life of every process of one deployment."""

    supervision: Supervision
    groups: dict[str, ManagedGroup]
    processes: dict[str, ManagedProcess] = field(default_factory=dict)
    complete: bool = False
    """True if every group once had as many ready processes as it needs."""
    stopping: bool = False
    exit_code: int = 0
    failure: str = ""
    _hurried: bool = False
    _stepped: float | None = None

    @classmethod
    def of(cls, plans: Iterable[GroupPlan], supervision: Supervision) -> ClusterController:
        """Return the controller of a deployment without running processes."""
        return cls(supervision, {plan.name: ManagedGroup(plan, plan.minimum) for plan in plans})

    @property
    def over(self) -> bool:
        """True if the deployment was stopped and no process is left."""
        return self.stopping and not self.processes

    def of_group(self, name: str) -> list[ManagedProcess]:
        """Return the processes of a group, oldest first."""
        return [each for each in self.processes.values() if each.group == name]

    def ready(self, name: str) -> int:
        """Return the number of ready processes of a group."""
        return sum(each.ready and each.phase is ProcessPhase.READY for each in self.of_group(name))

    def scale(self, name: str, wanted: int) -> list[ClusterNote]:
        """Set the target of a group to `wanted` processes, within its bounds."""
        group = self.groups[name]
        target = min(max(wanted, group.plan.minimum), group.plan.maximum)
        before, group.target = group.target, target
        return [] if target == before else [ClusterNote(f"{name}: {before} -> {target}")]

    def stop(self, now: float) -> list[ClusterAction]:
        """Begin the shutdown: routers drain first, and workers once no router is left. The second call hurries."""
        if self.stopping:
            return self._hurry(now)
        self.stopping = True
        return self._leave(now)

    def step(self, now: float, seen: Mapping[str, ObservedProcess]) -> list[ClusterAction]:
        """Return the actions that follow from observations of processes; processes not in `seen` are unchanged."""
        self._catch_up(now)
        actions: list[ClusterAction] = []
        known = [(self.processes[name], what) for name, what in seen.items() if name in self.processes]
        # No action applies to processes that ended, so all are removed before any end is judged.
        ended = [(self.processes.pop(process.name), what.end) for process, what in known if what.end is not None]
        for process, what in known:
            if what.end is None:
                actions += self._observe(process, what, now)
        for process, end in ended:
            if process.counts and not self.stopping:
                actions += self._died(process, end, now, worked=self._worked(process, now))
        for process in list(self.processes.values()):
            actions += self._decide(process, now)
        if self.stopping:
            return actions + self._leave(now)
        if not self.complete and all(self.ready(name) >= group.plan.minimum for name, group in self.groups.items()):
            self.complete = True
        for group in self.groups.values():
            actions += self._fill(group, now)
        return actions

    def _catch_up(self, now: float) -> None:
        """Exclude a time without observations, because this machine was suspended or too busy, from all timeouts."""
        away = 0.0 if self._stepped is None else now - self._stepped - self.supervision.longest_step
        self._stepped = now
        if away <= 0:
            return
        for process in self.processes.values():
            process.since += away
            process.last_healthy += away
            if process.deadline is not None:
                process.deadline += away

    def _observe(self, process: ManagedProcess, seen: ObservedProcess, now: float) -> Iterator[ClusterAction]:
        if seen.healthy:
            process.last_healthy = now
        process.ready = seen.ready
        if process.phase is ProcessPhase.STARTING and seen.ready:
            process.phase, process.since = ProcessPhase.READY, now
            process.last_healthy = now
            group = self.groups[process.group]
            group.served, group.no_capacity = True, False
            yield ClusterNote(f"{process.name} is ready")

    def _decide(self, process: ManagedProcess, now: float) -> Iterator[ClusterAction]:
        limits, passed = self.supervision, now - process.since
        if process.phase is ProcessPhase.STARTING and passed > limits.start_seconds:
            end = ProcessEnd(None, f"was not ready within {limits.start_seconds:g} s")
        elif process.phase is ProcessPhase.READY and now - process.last_healthy > limits.unhealthy_seconds:
            end = ProcessEnd(None, f"failed its health checks for {limits.unhealthy_seconds:g} s")
        else:
            group = self.groups[process.group]
            if process.phase is ProcessPhase.READY and passed > limits.stable_seconds:
                group.failures = 0 if process.since >= group.failed_at else group.failures
            if process.phase is ProcessPhase.DRAINING and process.deadline is not None and now >= process.deadline:
                process.phase, process.since = ProcessPhase.KILLED, now
                yield ClusterNote(f"{process.name} exceeded its drain timeout and is killed", bad=True)
                yield KillProcess(process.name)
            return
        worked = self._worked(process, now)
        process.phase, process.since = ProcessPhase.KILLED, now
        yield KillProcess(process.name)
        yield from self._died(process, end, now, worked=worked)

    def _worked(self, process: ManagedProcess, now: float) -> bool:
        """Return True if it ran for so long that its end is not a failed start."""
        return process.phase is ProcessPhase.READY and now - process.since > self.supervision.stable_seconds

    def _died(self, process: ManagedProcess, end: ProcessEnd, now: float, *, worked: bool) -> Iterator[ClusterAction]:
        group, limits = self.groups[process.group], self.supervision
        if self.complete and not end.placed:
            # A lost node may recover or be replaced: the processes are not at fault.
            if not group.no_capacity:
                yield ClusterNote(f"{process.name} waits for resources: {end.reason}", bad=True)
            group.no_capacity, group.not_before = True, now + limits.no_capacity_pause
            return
        group.deaths += 1
        group.failures, group.failed_at = 1 if worked else group.failures + 1, now
        pause = 0.0 if worked else min(limits.first_pause * 2 ** (group.failures - 1), limits.longest_pause)
        group.not_before = max(group.not_before, now + pause)
        hopeless = end.code in _OWN_FAULT and not group.served
        event = f"{process.name} {end.reason}"
        if not hopeless and group.failures <= limits.max_failures:
            yield ClusterNote(f"{event}; restarting in {pause:g} s", bad=True)
            return
        group.given_up = end.reason
        yield ClusterNote(f"{event}; {group.plan.name} is given up and no longer restarted", bad=True)
        if not self.complete:
            self.failure = f"{process.name} {end.reason}"
            self.exit_code = end.code if hopeless and end.code is not None else 1
            yield from self.stop(now)
            yield from self._hurry(now)

    def _fill(self, group: ManagedGroup, now: float) -> Iterator[ClusterAction]:
        """Start missing processes, and drain the excess: first those that are not ready, then the youngest."""
        name = group.plan.name
        living = [each for each in self.of_group(name) if each.counts]
        youngest_first = living[::-1]
        for each in sorted(youngest_first, key=lambda each: each.ready)[: max(len(living) - group.target, 0)]:
            yield self._drain(each, now)
        if group.given_up or now < group.not_before:
            return
        for _ in range(group.target - len(living)):
            group.starts += 1
            process = ManagedProcess(f"{name}-{group.starts}", name, now)
            self.processes[process.name] = process
            yield StartProcess(process.name, name)

    def _leave(self, now: float) -> list[ClusterAction]:
        """Drain the routers, and all processes that have no requests yet; once no router is left, the workers."""
        routers = any(self._is_router(each) for each in self.processes.values())
        return [
            self._drain(each, now)
            for each in self.processes.values()
            if each.counts and (not routers or self._is_router(each) or each.phase is ProcessPhase.STARTING)
        ]

    def _is_router(self, process: ManagedProcess) -> bool:
        return self.groups[process.group].plan.is_router

    def _hurry(self, now: float) -> list[ClusterAction]:
        if self._hurried:
            return []
        self._hurried = True
        living = [each for each in self.processes.values() if each.phase is not ProcessPhase.KILLED]
        return [self._drain(each, now, self.supervision.hurry_seconds) for each in living]

    def _drain(self, process: ManagedProcess, now: float, seconds: float | None = None) -> DrainProcess:
        process.phase, process.since = ProcessPhase.DRAINING, now
        process.deadline = now + (self.supervision.drain_seconds if seconds is None else seconds)
        return DrainProcess(process.name)
