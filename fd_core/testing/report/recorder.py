"""A pytest plugin that writes the outcome of each test as one line, so that a crash loses only one test.

python -m pytest -p fd_core.testing.report.recorder --pyargs fd_core.testing.suite --fd-results FILE ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fd_core.testing.kit import plugin
from fd_core.testing.report.model import AxisValue, CaseOutcome, Result

_REASON_LENGTH = 800
"""Enough for a case with all its values, twice."""


class BackendDescribed(msgspec.Struct, frozen=True, tag="about"):
    """Device, dtype and limits of a backend, known after its construction; a scheduler has only limits."""

    distribution: str
    device: str = ""
    dtype: str = ""
    emulated: bool = False
    limits: dict[str, str] = {}
    envelope: dict[str, int] = {}


class CaseStarted(msgspec.Struct, frozen=True, tag="started"):
    """A test began. If no `CaseEnded` follows, the test crashed the process."""

    target: str
    section: str
    test: str


class CaseEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A test ended."""

    target: str
    result: Result
    held: list[tuple[str, dict[str, AxisValue]]] = []
    """Part and values of each case that passed."""


class RunMisused(msgspec.Struct, frozen=True, tag="misused"):
    """The options name something that does not exist, such as a case, or cannot be parsed."""

    message: str


class CasesLeftOut(msgspec.Struct, frozen=True, tag="deselected"):
    """Number of tests of a section that the user excluded with `-k` or `-m`."""

    target: str
    section: str
    count: int


RecordedEvent = BackendDescribed | CaseStarted | CaseEnded | CasesLeftOut | RunMisused


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fd-results`."""
    plugin.pytest_addoption(parser)
    parser.addoption("--fd-results", metavar="FILE", help="file for the results of fd_core.testing.suite")


def pytest_configure(config: pytest.Config) -> None:
    """Record results if `--fd-results` was given."""
    path = config.getoption("--fd-results")
    if path is not None:
        # Workers collect the same tests; the first one reports what the collection found.
        worker = getattr(config, "workerinput", {"workerid": "gw0"})["workerid"]
        config.pluginmanager.register(_ResultRecorder(Path(path), collects=worker == "gw0"), "fd-results")


class _ResultRecorder:
    def __init__(self, path: Path, *, collects: bool) -> None:
        self._path = path
        self._collects = collects
        self._known: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self) -> Any:
        try:
            return (yield)
        except pytest.UsageError as error:
            self._write(RunMisused(str(error)))
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_generate_tests(self) -> Any:
        try:
            return (yield)
        except pytest.exit.Exception as error:
            self._write(RunMisused(error.msg))
            raise

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        counts = Counter(plugin.identity_of(item)[:2] for item in items if self._collects)
        for (target, section), count in counts.items():
            self._write(CasesLeftOut(target, section, count))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._write(CaseStarted(*plugin.identity_of(item)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        target, section, test = plugin.identity_of(item)
        found = getattr(item, "funcargs", {}).get("target")
        if call.when == "setup" and found is not None and target not in self._known:
            self._known.add(target)
            self._write(BackendDescribed(**found.about()))
        if (
            call.when == "call"
            or (call.when == "setup" and not report.passed)
            or (call.when == "teardown" and report.failed)
        ):
            result = Result(
                section=section,
                test=test,
                outcome=_outcome(report),
                reason="" if report.passed else _reason(item, report, call),
                seconds=round(call.duration, 4),
                rules=plugin.rules_of(item),
                expected=plugin.expectation_of(item),
            )
            self._write(CaseEnded(target, result, plugin.held_of(report)))
        return report

    def _write(self, event: RecordedEvent) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")


def _outcome(report: pytest.TestReport) -> CaseOutcome:
    if report.passed:
        return "pass"
    if report.skipped:
        return "expected" if hasattr(report, "wasxfail") else "limit"
    return "fail"


def _reason(item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    """Return one line with the outcome and the invariants that a failed test checks."""
    if call.excinfo is None:
        return ""
    lines = str(call.excinfo.value).strip().splitlines()
    text = lines[0].removeprefix("not tested: ") if lines else ""
    if text.startswith("assert "):  # without a message: pytest's lines name the values
        text = " ".join(" ".join(lines).split())
    is_limit = _outcome(report) == "limit"
    if not is_limit and not isinstance(call.excinfo.value, AssertionError):
        text = f"{call.excinfo.typename}: {text}"
    # A kit that knows the broken rule reports it itself.
    if not is_limit and not text.startswith("law ") and (rules := plugin.rules_of(item)):
        text = f"law {', '.join(rules)}: {text}"
    return text[:_REASON_LENGTH] or call.excinfo.typename
