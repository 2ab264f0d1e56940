"""Judges mutants: runs groups of tests against a copy of the package with a fault, and reports which test detected it.

The normal duration of each test is measured first, on the same machine without a fault. A test that takes several times
as long has detected nothing: it is skipped, and the other tests run.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.mutants.groups import Group

__all__ = [
    "Baseline",
    "Fate",
    "GroupLimits",
    "GroupRun",
    "RunGroup",
    "SessionFault",
    "Verdict",
    "baseline",
    "judge",
]

TIMES_BASELINE = 6.0
"""A test hangs when it takes this many times as long as without a fault."""
LEAST_SECONDS = 15.0
"""Minimum before a test is interrupted: a test of milliseconds may wait for a busy machine or the garbage collector."""
MOST_HANGS = 3
"""Number of hanging tests after which the verdict is that the mutant timed out."""
BASELINE_SECONDS_PER_TEST = 300.0
BASELINE_SECONDS_PER_GROUP = 1800.0


class SessionFault(RuntimeError):
    """The tests could not run, or fail without a fault, which proves nothing about a mutant."""


class Fate(enum.Enum):
    """Result of a mutant; the session passes only if every mutant was killed."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Fate of one mutant: the test that killed it, or the tests that hung, if any."""

    fate: Fate
    tests: tuple[str, ...] = ()

    def __str__(self) -> str:
        match self.fate:
            case Fate.KILLED:
                return f"killed by {self.tests[0]}"
            case Fate.SURVIVED:
                return "SURVIVED"
            case Fate.TIMED_OUT:
                return f"TIMED OUT in {', '.join(self.tests)}"


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Limits in seconds for each test, for tests without an entry, and for the whole group."""

    tests: Mapping[str, float]
    other_tests: float
    group: float


@dataclass(frozen=True, slots=True)
class GroupRun:
    """Result of one process: its seconds, the seconds of each passing test, and the test that ended it early.

    `failed` and `hung` are None if every test passed; `hung` is the group's name if pytest hung outside of a test.
    """

    seconds: float
    passed: Mapping[str, float]
    failed: str | None = None
    hung: str | None = None


RunGroup = Callable[[Group, GroupLimits, frozenset[str]], GroupRun]
"""Runs a group under limits, without the given tests, until a test fails or hangs."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Result of each group without a fault, by name."""

    runs: Mapping[str, GroupRun]

    @property
    def seconds(self) -> dict[str, float]:
        """Duration of each group in seconds."""
        return {name: run.seconds for name, run in self.runs.items()}

    def limits(self, group: Group) -> GroupLimits:
        """Return the time limits of the tests of `group` for runs against a mutant."""
        run = self.runs[group.name]
        each = {test: max(LEAST_SECONDS, TIMES_BASELINE * seconds) for test, seconds in run.passed.items()}
        return GroupLimits(each, LEAST_SECONDS, 2 * LEAST_SECONDS + TIMES_BASELINE * run.seconds)


def baseline(found: Sequence[Group], run: RunGroup, jobs: int) -> Baseline:
    """Run every group without a fault, with `jobs` in parallel, as later against mutants.

    Raises `SessionFault` if a test fails or hangs, or if a group has no tests.
    """
    generous = GroupLimits({}, BASELINE_SECONDS_PER_TEST, BASELINE_SECONDS_PER_GROUP)
    with ThreadPoolExecutor(jobs) as pool:
        # The longest group is last and determines the total duration: it starts first.
        runs = list(pool.map(lambda group: run(group, generous, frozenset()), reversed(found)))
    for group, done in zip(reversed(found), runs, strict=True):
        if (culprit := done.failed or done.hung) is not None:
            how = "fails" if done.failed else f"takes more than {BASELINE_SECONDS_PER_TEST:.0f} s in"
            raise SessionFault(f"the code without a mutant {how} {culprit}: no mutant can be judged")
        if not done.passed:
            raise SessionFault(f"no test of the group {group.name} ran")
    return Baseline({group.name: done for group, done in zip(reversed(found), runs, strict=True)})


def judge(ordered: Iterable[Group], run: RunGroup, measured: Baseline) -> Verdict:
    """Run the groups in order until a test fails. Raises `SessionFault` if pytest could not run."""
    hung: list[str] = []
    for group in ordered:
        passing = measured.runs[group.name].passed.keys()
        skip = frozenset(test for test in hung if test in passing)
        while skip < passing:
            done = run(group, measured.limits(group), skip)
            if done.failed is not None:
                return Verdict(Fate.KILLED, (done.failed,))
            if done.hung is None:
                break
            hung.append(done.hung)
            if len(hung) == MOST_HANGS:
                return Verdict(Fate.TIMED_OUT, tuple(hung))
            if done.hung == group.name:
                break
            # State left by an interrupted test must not affect the verdict: the rest runs in a new process.
            skip |= {done.hung, *done.passed}
    return Verdict(Fate.TIMED_OUT if hung else Fate.SURVIVED, tuple(hung))
