"""Verdicts of the session on simulated runs with passing, failing and hanging tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.mutants.copies import mutated, pristine, runner
from tests.mutants.groups import ROOT, Group, in_order, killer_group
from tests.mutants.mutant import mutant
from tests.mutants.session import (
    LEAST_SECONDS,
    MOST_HANGS,
    TIMES_BASELINE,
    Baseline,
    Fate,
    GroupLimits,
    GroupRun,
    SessionFault,
    baseline,
    judge,
)

A, B = Group("a", ("tests/a/test_a.py",)), Group("b", ("tests/b/test_b.py",))
MEASURED = Baseline({"a": GroupRun(9.0, {"a1": 4.0, "a2": 0.1, "a3": 0.1}), "b": GroupRun(2.0, {"b1": 1.0, "b2": 1.0})})


class Machine:
    """Simulated test runs: some tests fail at once, some hang; every other takes its duration in `seconds`."""

    def __init__(self, failing: str = "", hanging: str = "", slowness: float = 1.0) -> None:
        self.failing, self.hanging, self.slowness = failing.split(), hanging.split(), slowness
        self.runs: list[tuple[str, frozenset[str]]] = []

    def run(self, group: Group, limits: GroupLimits, skip: frozenset[str]) -> GroupRun:
        self.runs.append((group.name, skip))
        passed: dict[str, float] = {}
        for test, usual in MEASURED.runs[group.name].passed.items():
            if test in skip:
                continue
            seconds = self.slowness * usual
            if test in self.failing:
                return GroupRun(sum(passed.values()), passed, failed=test)
            if test in self.hanging or seconds > limits.tests.get(test, limits.other_tests):
                return GroupRun(sum(passed.values()), passed, hung=test)
            passed[test] = seconds
        return GroupRun(sum(passed.values()), passed)


def test_failing_test_kills_the_mutant_and_ends_the_run() -> None:
    machine = Machine(failing="a2")
    verdict = judge([A, B], machine.run, MEASURED)
    assert (verdict.fate, verdict.tests) == (Fate.KILLED, ("a2",))
    assert machine.runs == [("a", frozenset())]


def test_mutant_that_passes_every_test_survives() -> None:
    machine = Machine()
    assert judge([A, B], machine.run, MEASURED).fate is Fate.SURVIVED
    assert [name for name, _ in machine.runs] == ["a", "b"]


def test_hanging_test_does_not_kill() -> None:
    verdict = judge([A, B], Machine(hanging="a1").run, MEASURED)
    assert (verdict.fate, verdict.tests) == (Fate.TIMED_OUT, ("a1",))
    assert "killed" not in str(verdict)


def test_tests_after_a_hanging_one_still_run() -> None:
    machine = Machine(hanging="a1", failing="a2")
    assert judge([A, B], machine.run, MEASURED).tests == ("a2",)
    assert machine.runs == [("a", frozenset()), ("a", frozenset({"a1"}))]


def test_tests_that_passed_before_a_hang_are_not_repeated() -> None:
    machine = Machine(hanging="a2", failing="b2")
    assert judge([A, B], machine.run, MEASURED).fate is Fate.KILLED
    assert machine.runs == [("a", frozenset()), ("a", frozenset({"a1", "a2"})), ("b", frozenset())]


def test_last_killer_runs_first_and_alone() -> None:
    passed = {name: run.passed for name, run in MEASURED.runs.items()}
    assert killer_group("b2", (A, B), passed) == Group("b", ("b2",))
    assert killer_group("removed test", (A, B), passed) is None
    assert killer_group(None, (A, B), passed) is None


def test_hanging_killer_runs_once_and_other_tests_still_run() -> None:
    machine = Machine(hanging="a1", failing="b1")
    verdict = judge([Group("a", ("a1",)), A, B], machine.run, MEASURED)
    assert verdict.tests == ("b1",)
    assert machine.runs[-2:] == [("a", frozenset({"a1"})), ("b", frozenset())]


def test_mutant_times_out_after_several_hangs() -> None:
    machine = Machine(hanging="a1 a2 a3 b1 b2")
    verdict = judge([A, B], machine.run, MEASURED)
    assert (verdict.fate, len(verdict.tests), len(machine.runs)) == (Fate.TIMED_OUT, MOST_HANGS, MOST_HANGS)


def test_group_that_hangs_outside_a_test_runs_once() -> None:
    names = []

    def run(group: Group, _limits: GroupLimits, _skip: frozenset[str]) -> GroupRun:
        names.append(group.name)
        return GroupRun(1.0, {}, hung=group.name)

    assert judge([A, B], run, MEASURED).fate is Fate.TIMED_OUT
    assert names == ["a", "b"]


def test_limits_are_a_multiple_of_the_baseline_with_a_minimum() -> None:
    limits = MEASURED.limits(A)
    assert limits.tests == {"a1": TIMES_BASELINE * 4.0, "a2": LEAST_SECONDS, "a3": LEAST_SECONDS}
    assert limits.other_tests == LEAST_SECONDS
    assert limits.group > TIMES_BASELINE * 9.0


@pytest.mark.parametrize("slowness", [2.0, 20.0])
def test_verdict_does_not_depend_on_the_speed_of_the_machine(slowness: float) -> None:
    """Limits scale with the baseline: a surviving mutant is neither killed nor timed out on a slow machine."""
    measured = baseline([A, B], Machine(slowness=slowness).run, jobs=1)
    assert measured.limits(A).tests["a1"] == slowness * TIMES_BASELINE * 4.0
    for failing, fate in (("", Fate.SURVIVED), ("b2", Fate.KILLED)):
        assert judge([A, B], Machine(failing, slowness=1.5 * slowness).run, measured).fate is fate


@pytest.mark.parametrize("machine", [Machine(failing="b1"), Machine(hanging="b1")], ids=["fails", "hangs"])
def test_failing_baseline_fails_the_session(machine: Machine) -> None:
    with pytest.raises(SessionFault, match="b1: no mutant can be judged"):
        baseline([A, B], machine.run, jobs=2)


def test_group_without_tests_fails_the_session() -> None:
    with pytest.raises(SessionFault, match="no test of the group b"):
        baseline([A, B], lambda group, _limits, _skip: GroupRun(1.0, {"a1": 1.0} if group is A else {}), jobs=1)


@pytest.mark.parametrize(("mutated_file", "order"), [("b/x.py", "ba"), ("a/x.py", "ab"), ("c/x.py", "ba")])
def test_groups_run_the_mutants_folder_first_then_by_cost(mutated_file: str, order: str) -> None:
    found = in_order((A, B), mutant("m", "1.1", (mutated_file, "old", "new")), MEASURED.seconds)
    assert "".join(group.name for group in found) == order


TESTS = """
import time
from fd_core.value import value

def test_passes():
    assert True

def test_ends():
    until = time.monotonic() + 60
    while value() == 0 and time.monotonic() < until:
        time.sleep(0.01)

def test_is_one():
    assert value() in (0, 1)
"""


def copy_with(folder: Path, tests: Mapping[str, str]) -> Path:
    root = Path(__file__).parents[2]
    (folder / "fd_core").mkdir(parents=True)
    (folder / "fd_core/__init__.py").touch()
    (folder / "fd_core/value.py").write_text("def value():\n    return 1\n")
    (folder / "tests/mutants").mkdir(parents=True)
    for name in ("__init__.py", "mutants/__init__.py", "mutants/quick.py"):
        (folder / "tests" / name).write_text((root / "tests" / name).read_text())
    for name, text in tests.items():
        (folder / "tests" / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("value", "skip", "failed", "hung"),
    [(1, [], None, None), (2, [], "test_is_one", None), (0, [], None, "test_ends"), (0, ["test_ends"], None, None)],
)
def test_pytest_on_a_copy_distinguishes_failing_from_hanging(
    value: int, skip: list[str], failed: str | None, hung: str | None, tmp_path: Path
) -> None:
    original, file = copy_with(tmp_path / "original", {"test_value.py": TESTS}), "tests/test_value.py"
    fault = mutant("m", "1.1", ("value.py", "return 1", f"return {value}"))
    with mutated(original, fault) as copy:
        # Disabled: it belongs to the package of the project, which the copy replaces.
        run = runner(copy, "-p", "no:fd_core")
        limits = GroupLimits({f"{file}::test_ends": 1.0}, 30.0, 60.0)
        done = run(Group("g", (file,)), limits, frozenset(f"{file}::{name}" for name in skip))
    assert done.failed == (failed and f"{file}::{failed}")
    assert done.hung == (hung and f"{file}::{hung}")
    assert f"{file}::test_passes" in done.passed


def test_copy_contains_the_kernel_sources() -> None:
    """Engine tests use the kernels; compiled kernels are found by these sources."""
    with pristine() as copy:
        where = Path("fd_core/ops/native/csrc")
        copied, own = (sorted(path.name for path in (at / where).rglob("*")) for at in (copy, ROOT))
        assert copied == own


def test_copy_with_unimportable_tests_raises_session_fault(tmp_path: Path) -> None:
    copy = copy_with(tmp_path / "copy", {"test_value.py": "import nothing_of_this_name\n"})
    with pytest.raises(SessionFault, match="nothing_of_this_name"):
        runner(copy, "-p", "no:fd_core")(Group("g", ("tests/test_value.py",)), GroupLimits({}, 30.0, 60.0), frozenset())
