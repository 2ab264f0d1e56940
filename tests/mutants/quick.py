"""A pytest plugin for runs that only ask whether a fault is noticed.

Examples are fixed, none is made smaller, and only the file of `--mutant-order` says how long a test may take. What each
test did is written to a report line by line, so that the lines outlive a process that had to be killed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings

__all__ = ["Began", "Ended", "Line", "Order"]

settings.register_profile(
    "mutants",
    phases=(Phase.explicit, Phase.generate),
    database=None,
    derandomize=True,
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow,),
)


class Order(msgspec.Struct, frozen=True):
    """What one process is to do, in seconds for each test, and where it writes its lines."""

    report: str
    limits: dict[str, float]
    limit_of_others: float
    skip: frozenset[str]


class Began(msgspec.Struct, frozen=True, tag=True):
    """A test began."""

    test: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A test ended after `seconds`, set-up and clean-up included; `outcome` is passed, failed or hung."""

    test: str
    seconds: float
    outcome: str


Line = Began | Ended


class _Recorder:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._report = Path(order.report).open("ab", buffering=0)  # noqa: SIM115  # open until the process ends
        self._failed: set[str] = set()
        self._began = 0.0
        self._status = int(pytest.ExitCode.INTERNAL_ERROR)

    def _limit(self, test: str) -> float:
        return self._order.limits.get(test, self._order.limit_of_others)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._order.skip]
        for item in items:
            item.add_marker(pytest.mark.timeout(self._limit(item.nodeid)), append=False)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began = time.monotonic()
        self._write(Began(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds = time.monotonic() - self._began
        # Hypothesis may wrap what interrupts a test, so the time tells; the timer starts a moment before `_began`.
        hung = seconds >= 0.95 * self._limit(nodeid)
        self._write(Ended(nodeid, seconds, "passed" if nodeid not in self._failed else "hung" if hung else "failed"))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._status = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        # A test that was interrupted may leave threads behind for which the interpreter would wait.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._status)

    def _write(self, line: Line) -> None:
        self._report.write(msgspec.json.encode(line) + b"\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the order's file."""
    parser.addoption("--mutant-order", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Follow the order, with the profile of this plugin instead of that of the tests."""
    settings.load_profile("mutants")
    order = msgspec.json.decode(config.getoption("--mutant-order").read_bytes(), type=Order)
    config.pluginmanager.register(_Recorder(order))
