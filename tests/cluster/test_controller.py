"""Lifecycle decisions of a deployment without processes: by example and in adversarial orders."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fd_core.cluster.controller import (
    ClusterAction,
    ClusterController,
    ClusterNote,
    DrainProcess,
    GroupPlan,
    KillProcess,
    ObservedProcess,
    ProcessEnd,
    ProcessPhase,
    StartProcess,
    Supervision,
)

LIMITS = Supervision(
    start_seconds=60, unhealthy_seconds=20, drain_seconds=30, hurry_seconds=3, stable_seconds=10, max_failures=3
)
UP = ObservedProcess(ready=True, healthy=True)
PLANS = (GroupPlan("router", 1, 1, is_router=True), GroupPlan("mixed", 2, 4))


def killed(code: int | None = -9, reason: str = "was ended by SIGKILL", placed: bool = True) -> ObservedProcess:
    return ObservedProcess(end=ProcessEnd(code, reason, placed))


def controller(*plans: GroupPlan) -> ClusterController:
    return ClusterController.of(plans or PLANS, LIMITS)


def named(kind: type[StartProcess | DrainProcess | KillProcess], actions: Iterable[ClusterAction]) -> list[str]:
    return [each.name for each in actions if isinstance(each, kind)]


def serving(now: float = 0.0) -> ClusterController:
    """Return a controller whose processes have been ready for a long time."""
    made = controller()
    names = named(StartProcess, made.step(now, {}))
    assert all(isinstance(each, ClusterNote) for each in made.step(now, dict.fromkeys(names, UP)))
    for at in range(1, 20):
        assert not made.step(now + at, dict.fromkeys(names, UP))
    return made


def well(made: ClusterController) -> dict[str, ObservedProcess]:
    """Return observations in which nothing happens."""
    return {each.name: UP for each in made.processes.values() if each.phase is ProcessPhase.READY}


def test_every_group_starts_with_its_minimum() -> None:
    assert named(StartProcess, controller().step(0, {})) == ["router-1", "mixed-1", "mixed-2"]


def test_deployment_is_ready_when_all_groups_have_their_minimum() -> None:
    made = controller()
    made.step(0, {})
    made.step(1, {"router-1": UP, "mixed-1": UP})
    assert not made.complete
    made.step(2, {"mixed-2": UP})
    assert made.complete


def test_long_running_process_is_replaced_at_once() -> None:
    made = serving()
    actions = made.step(20, {"mixed-1": killed()})
    assert named(StartProcess, actions) == ["mixed-3"]
    assert made.groups["mixed"].deaths == 1


def test_failed_starts_back_off() -> None:
    made, now, starts = serving(), 20.0, []
    name = "mixed-1"
    for _ in range(3):
        found = named(StartProcess, made.step(now, {name: killed()}))
        died = now
        while not found:
            now += 0.25
            found = named(StartProcess, made.step(now, {}))
        starts.append(now - died)
        (name,) = found
        now += 1
    assert starts == [0, 2, 4]


def test_group_is_abandoned_after_too_many_failed_starts() -> None:
    made, now, name = serving(), 20.0, "mixed-1"
    while not made.groups["mixed"].given_up:
        actions = made.step(now, {name: killed(1, "ended with exit code 1")} if name else {})
        name = next(iter(named(StartProcess, actions)), "")
        now += 1
        assert now < 200
    assert not made.failure and not made.stopping
    assert [each.name for each in made.of_group("mixed")] == ["mixed-2"]
    assert any(isinstance(each, ClusterNote) and each.bad and "given up" in each.text for each in actions)


@pytest.mark.parametrize("code", [2, 3, 4])
def test_permanent_start_error_ends_deployment_with_its_code(code: int) -> None:
    made = controller()
    made.step(0, {})
    actions = made.step(1, {"mixed-2": killed(code, "ended; it said: no such model")})
    assert made.stopping and made.exit_code == code and "no such model" in made.failure
    assert set(named(DrainProcess, actions)) == {"router-1", "mixed-1"}


def test_port_in_use_after_serving_is_retried() -> None:
    made = serving()
    assert not made.step(20, {"router-1": killed(2, "cannot listen")})[0].text.endswith("given up")  # type: ignore[union-attr]
    assert not made.groups["router"].given_up


def test_lost_node_is_awaited_indefinitely() -> None:
    made, now, name = serving(), 20.0, "mixed-1"
    for _ in range(400):
        seen = {"router-1": UP, "mixed-2": UP, **({name: killed(None, "no room", placed=False)} if name else {})}
        actions = made.step(now, seen)
        name = next(iter(named(StartProcess, actions)), "")
        now += 1
    assert not made.groups["mixed"].given_up
    assert 50 < made.groups["mixed"].starts < 90


def test_scale_down_removes_the_youngest() -> None:
    made = serving()
    made.scale("mixed", 4)
    names = named(StartProcess, made.step(20, {}))
    made.step(21, dict.fromkeys(names, UP))
    made.scale("mixed", 3)
    assert named(DrainProcess, made.step(22, {})) == [names[-1]]
    assert not named(DrainProcess, made.step(23, {}))


def test_scale_down_removes_unready_processes_first() -> None:
    made = serving()
    made.scale("mixed", 3)
    (third,) = named(StartProcess, made.step(20, {}))
    made.step(21, {third: UP})
    made.step(22, {"mixed-1": ObservedProcess(ready=False, healthy=True)})
    made.scale("mixed", 2)
    assert named(DrainProcess, made.step(23, {})) == ["mixed-1"]


@pytest.mark.parametrize(("wanted", "target"), [(0, 2), (3, 3), (9, 4)])
def test_policy_is_clamped_to_bounds(wanted: int, target: int) -> None:
    made = serving()
    made.scale("mixed", wanted)
    assert made.groups["mixed"].target == target


def test_draining_process_is_killed_at_its_deadline() -> None:
    made = serving()
    made.scale("mixed", 3)
    made.step(20, {})
    made.scale("mixed", 2)
    assert named(DrainProcess, made.step(21, {})) == ["mixed-3"]
    for now in range(22, 51):
        assert not named(KillProcess, made.step(now, well(made)))
    assert named(KillProcess, made.step(51, well(made))) == ["mixed-3"]
    assert not named(KillProcess, made.step(52, well(made)))


def test_process_that_is_never_ready_is_replaced() -> None:
    made = serving()
    made.scale("mixed", 3)
    made.step(20, {})
    for now in range(21, 81):
        assert not named(KillProcess, made.step(now, well(made)))
    actions = made.step(81, well(made))
    assert named(KillProcess, actions) == ["mixed-3"]
    assert named(StartProcess, made.step(83, well(made))) == ["mixed-4"]


def test_worker_with_restarting_engine_gets_a_grace_period() -> None:
    made = serving()
    down = {"mixed-1": ObservedProcess(ready=False, healthy=False)}
    for now in range(20, 39):
        assert not made.step(now, {**well(made), **down})
    later = [action for now in range(39, 45) for action in made.step(now, {**well(made), **down})]
    assert named(KillProcess, later) == ["mixed-1"]


def test_machine_suspension_does_not_count_as_timeout() -> None:
    made = serving()
    assert not made.step(5000, {})
    assert not made.step(5001, dict.fromkeys(made.processes, UP))


def test_workers_stop_after_the_last_router() -> None:
    made = serving()
    assert named(DrainProcess, made.stop(20)) == ["router-1"]
    assert not named(DrainProcess, made.step(21, {}))
    assert named(DrainProcess, made.step(22, {"router-1": killed(0, "ended")})) == ["mixed-1", "mixed-2"]
    made.step(23, {"mixed-1": killed(0, "ended"), "mixed-2": killed(0, "ended")})
    assert made.over


def test_second_interrupt_shortens_drain_to_seconds() -> None:
    made = serving()
    made.stop(20)
    assert set(named(DrainProcess, made.stop(21))) == {"router-1", "mixed-1", "mixed-2"}
    assert not made.stop(22)
    assert set(named(KillProcess, made.step(24, {}))) == {"router-1", "mixed-1", "mixed-2"}


def test_death_during_shutdown_starts_no_process() -> None:
    made = serving()
    made.stop(20)
    assert not named(StartProcess, made.step(21, {"mixed-1": killed()}))


def test_simultaneous_exits_are_both_recorded() -> None:
    made = controller()
    made.step(0, {})
    actions = made.step(1, {"router-1": killed(2), "mixed-1": killed(0)})
    assert set(named(DrainProcess, actions)) == {"mixed-2"}


class Deployments(RuleBasedStateMachine):
    """Stateful test with processes that boot, serve, fail, stall and end at any time."""

    @initialize(fewest=st.integers(1, 3), more=st.integers(0, 2), routers=st.integers(1, 2))
    def begin(self, fewest: int, more: int, routers: int) -> None:
        plans = GroupPlan("router", routers, routers, is_router=True), GroupPlan("mixed", fewest, fewest + more)
        self.made = controller(*plans)
        self.now = 0.0
        self.alive: dict[str, str] = {}
        """Running processes and their states."""
        self.names: set[str] = set()
        self.drained: dict[str, float] = {}
        self.drains: dict[str, int] = {}
        self.killed: set[str] = set()
        self.ends: dict[str, ProcessEnd] = {}
        self.hurried = False
        self.step()

    def step(self, seconds: float = 0.0) -> None:
        self.now += seconds
        seen = {
            name: ObservedProcess(how == "ready", how in ("ready", "restarting"), self.ends.get(name))
            for name, how in self.alive.items()
        }
        for name in self.ends:
            self.alive.pop(name, None)
        self.ends.clear()
        self.perform(self.made.step(self.now, seen))

    def perform(self, actions: list[ClusterAction]) -> None:
        drains = named(DrainProcess, actions)
        self.hurried = self.hurried or bool(self.made.failure)
        for action in actions:
            match action:
                case StartProcess(name, group):
                    assert name not in self.names, "a name is used once"
                    assert not self.made.stopping
                    assert not self.made.groups[group].given_up
                    self.names.add(name)
                    self.alive[name] = "booting"
                case DrainProcess(name):
                    assert name in self.alive and name not in self.killed
                    self.drains[name] = self.drains.get(name, 0) + 1
                    assert self.drains[name] <= 1 + self.hurried
                    self.drained.setdefault(name, self.now)
                case KillProcess(name):
                    assert name in self.alive and name not in self.killed, "a process is killed once"
                    self.killed.add(name)
                    if name in self.drained:
                        limit = LIMITS.hurry_seconds if self.hurried else LIMITS.drain_seconds
                        assert self.now >= self.drained[name] + limit, "its requests had time to finish"
        if not self.made.stopping:
            self.check_kept(drains)
        elif not self.hurried and self.routers():
            assert all(name.startswith("router") or self.alive[name] == "booting" for name in drains)

    def check_kept(self, drains: list[str]) -> None:
        """Check that a ready process is stopped only if enough ready ones remain."""
        for name, group in self.made.groups.items():
            if any(self.alive[each] == "ready" for each in drains if each.startswith(name)):
                assert self.made.ready(name) >= group.plan.minimum

    def routers(self) -> list[str]:
        return [name for name in self.made.processes if name.startswith("router")]

    def some(self, data: st.DataObject, *how: str) -> str | None:
        found = [name for name, state in self.alive.items() if not how or state in how]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.9]), steps=st.integers(1, 8))
    def pass_time(self, seconds: float, steps: int) -> None:
        for _ in range(steps):
            self.step(seconds)

    @rule(data=st.data())
    def boot(self, data: st.DataObject) -> None:
        if name := self.some(data, "booting", "restarting", "silent"):
            self.alive[name] = "ready"

    @rule(data=st.data(), how=st.sampled_from(["restarting", "silent"]))
    def falter(self, data: st.DataObject, how: str) -> None:
        if name := self.some(data, "ready"):
            self.alive[name] = how

    @rule(data=st.data(), code=st.sampled_from([0, 1, 2, 3, -9, None]), placed=st.booleans())
    def end(self, data: st.DataObject, code: int | None, placed: bool) -> None:
        if name := self.some(data):
            self.ends[name] = ProcessEnd(code, "it ended", placed or self.alive[name] != "booting")

    @rule()
    def end_on_request(self) -> None:
        for name in [*self.drained, *self.killed]:
            if name in self.alive:
                self.ends[name] = ProcessEnd(0, "it ended")

    @rule(wanted=st.integers(-1, 7))
    def scale(self, wanted: int) -> None:
        self.made.scale("mixed", wanted)
        self.step()

    @precondition(lambda self: self.now > 60)
    @rule()
    def stop(self) -> None:
        self.step()
        self.hurried = self.hurried or self.made.stopping
        self.perform(self.made.stop(self.now))

    @invariant()
    def every_process_has_exactly_one_owner(self) -> None:
        assert set(self.made.processes) == set(self.alive)

    @invariant()
    def groups_stay_within_maximum(self) -> None:
        for name, group in self.made.groups.items():
            assert sum(each.counts for each in self.made.of_group(name)) <= group.plan.maximum

    def teardown(self) -> None:
        if not hasattr(self, "made"):
            return
        if not self.made.stopping:
            self.recovers()
        self.hurried = self.hurried or self.made.stopping
        self.perform(self.made.stop(self.now))
        while not self.made.over:
            assert self.now < 10_000
            self.end_on_request()
            self.step(4.0)

    def recovers(self) -> None:
        """Check that without further faults every group not abandoned recovers its size."""
        for _ in range(40):
            self.end_on_request()
            self.alive |= dict.fromkeys(self.alive, "ready")
            self.step(4.0)
            groups = self.made.groups.items()
            if self.made.stopping or all(
                each.given_up or self.made.ready(name) == each.target for name, each in groups
            ):
                return
        raise AssertionError("a group does not recover")


Deployments.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestDeployments = Deployments.TestCase


def test_phases_have_distinct_descriptions() -> None:
    assert {phase.value for phase in ProcessPhase} == {"starting", "ready", "draining", "killed"}
