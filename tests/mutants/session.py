"""Judges mutants: runs groups of tests against a copy of the package with a fault in it, and says what they noticed.

How long a test may take is measured first, on the code without a fault and on the same machine. A test that is still
running after several times as long has noticed nothing: it is left out, and the others are asked.
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
"""No test is interrupted before: what takes milliseconds may wait for a busy machine or a garbage collection."""
MOST_HANGS = 3
"""After so many tests that hang, the mutant's verdict is that it timed out."""
BASELINE_SECONDS_PER_TEST = 300.0
BASELINE_SECONDS_PER_GROUP = 1800.0


class SessionFault(RuntimeError):
    """The tests could not be run, or fail without a fault, which says nothing about a mutant."""


class Fate(enum.Enum):
    """What became of a mutant; the session passes only if every mutant was killed."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The fate of one mutant: the test that killed it, or the tests that hung, if any."""

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
    """Seconds that each test, any test without an entry, and the whole group may take."""

    tests: Mapping[str, float]
    other_tests: float
    group: float


@dataclass(frozen=True, slots=True)
class GroupRun:
    """What one process did: seconds in all, seconds of each test that passed, and the test that ended it early.

    `failed` and `hung` are None if every test passed; `hung` is the group's name if pytest hung outside of a test.
    """

    seconds: float
    passed: Mapping[str, float]
    failed: str | None = None
    hung: str | None = None


RunGroup = Callable[[Group, GroupLimits, frozenset[str]], GroupRun]
"""Runs a group under limits, without the tests named last, until a test fails or hangs."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What each group did without a fault, by name."""

    runs: Mapping[str, GroupRun]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each group took."""
        return {name: run.seconds for name, run in self.runs.items()}

    def limits(self, group: Group) -> GroupLimits:
        """Return how long the tests of `group` may take against a mutant."""
        run = self.runs[group.name]
        each = {test: max(LEAST_SECONDS, TIMES_BASELINE * seconds) for test, seconds in run.passed.items()}
        return GroupLimits(each, LEAST_SECONDS, 2 * LEAST_SECONDS + TIMES_BASELINE * run.seconds)


def baseline(found: Sequence[Group], run: RunGroup, jobs: int) -> Baseline:
    """Run every group without a fault, `jobs` side by side as later against mutants.

    Raises `SessionFault` if a test fails or hangs, or if a group has no tests.
    """
    generous = GroupLimits({}, BASELINE_SECONDS_PER_TEST, BASELINE_SECONDS_PER_GROUP)
    with ThreadPoolExecutor(jobs) as pool:
        # The longest group stands last and decides when all are done: it begins first.
        runs = list(pool.map(lambda group: run(group, generous, frozenset()), reversed(found)))
    for group, done in zip(reversed(found), runs, strict=True):
        if (culprit := done.failed or done.hung) is not None:
            how = "fails" if done.failed else f"takes more than {BASELINE_SECONDS_PER_TEST:.0f} s in"
            raise SessionFault(f"the code without a mutant {how} {culprit}: nothing can be learned from mutants")
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
            # What an interrupted test left behind must not judge: the rest runs in a process of its own.
            skip |= {done.hung, *done.passed}
    return Verdict(Fate.TIMED_OUT if hung else Fate.SURVIVED, tuple(hung))
