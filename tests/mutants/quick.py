"""Pytest plugin for runs that only check whether a fault is detected.

Examples are fixed and not shrunk; only the file of `--mutant-order` limits the duration of a test. The result of each
test is written to a report line by line, so that it survives a process that has to be killed.
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
    """Time limits of the tests in seconds, and the path of the report of one process."""

    report: str
    limits: dict[str, float]
    limit_of_others: float
    skip: frozenset[str]


class Began(msgspec.Struct, frozen=True, tag=True):
    """A test started."""

    test: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A test ended after `seconds`, set-up and tear-down included; `outcome` is passed, failed or hung."""

    test: str
    seconds: float
    outcome: str


Line = Began | Ended


class _Recorder:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._report = Path(order.report).open("ab", buffering=0)  # noqa: SIM115  # stays open until the process ends
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
        # Hypothesis may wrap the interrupting exception, so the duration decides; the timer starts before `_began`.
        hung = seconds >= 0.95 * self._limit(nodeid)
        self._write(Ended(nodeid, seconds, "passed" if nodeid not in self._failed else "hung" if hung else "failed"))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._status = int(exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        # An interrupted test may leave threads that the interpreter would wait for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._status)

    def _write(self, line: Line) -> None:
        self._report.write(msgspec.json.encode(line) + b"\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the path of the order."""
    parser.addoption("--mutant-order", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Apply the order, with this plugin's Hypothesis profile instead of that of the tests."""
    settings.load_profile("mutants")
    order = msgspec.json.decode(config.getoption("--mutant-order").read_bytes(), type=Order)
    config.pluginmanager.register(_Recorder(order))
