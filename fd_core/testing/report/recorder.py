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
from fd_core.testing.report.model import Result


class BackendDescribed(msgspec.Struct, frozen=True, tag="about"):
    """Device, dtype and limits of a backend, known after its construction; a scheduler has only limits."""

    distribution: str
    device: str = ""
    dtype: str = ""
    emulated: bool = False
    limits: dict[str, str] = {}


class CaseStarted(msgspec.Struct, frozen=True, tag="started"):
    """A test began. If no `CaseEnded` follows, the test crashed the process."""

    target: str
    section: str
    test: str


class CaseEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A test ended."""

    target: str
    result: Result


class CasesLeftOut(msgspec.Struct, frozen=True, tag="deselected"):
    """Number of tests of a section that the user excluded with `-k` or `-m`."""

    target: str
    section: str
    count: int


RecordedEvent = BackendDescribed | CaseStarted | CaseEnded | CasesLeftOut


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fd-results`."""
    plugin.pytest_addoption(parser)
    parser.addoption("--fd-results", metavar="FILE", help="file for the results of fd_core.testing.suite")


def pytest_configure(config: pytest.Config) -> None:
    """Record results if `--fd-results` was given."""
    path = config.getoption("--fd-results")
    if path is not None:
        config.pluginmanager.register(_ResultRecorder(Path(path)), "fd-results")


class _ResultRecorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[str] = set()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        counts = Counter(identity_of(item)[:2] for item in items)
        for (target, section), count in counts.items():
            self._write(CasesLeftOut(target, section, count))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._write(CaseStarted(*identity_of(item)))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        target, section, test = identity_of(item)
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
                outcome="pass" if report.passed else "limit" if report.skipped else "fail",
                reason="" if report.passed else _reason(item, report, call),
                seconds=round(call.duration, 4),
                rules=plugin.rules_of(item),
            )
            self._write(CaseEnded(target, result))
        return report

    def _write(self, event: RecordedEvent) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")


def identity_of(item: pytest.Item) -> tuple[str, str, str]:
    """Return target, section and test of an item; a section is a file, or a folder of files."""
    path = Path(item.path)
    module = (path.parent if path.parent.parent.name == "suite" else path).stem.removeprefix("test_")
    function = getattr(item, "originalname", item.name)
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return "", module, function
    target = str(callspec.params.get("target", ""))
    parts = callspec.id.removeprefix(target).lstrip("-")
    return target, module, f"{function}[{parts}]" if parts else function


def _reason(item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    """Return one line with the outcome and the invariants that a failed test checks."""
    if call.excinfo is None:
        return ""
    lines = str(call.excinfo.value).strip().splitlines()
    text = lines[0].removeprefix("not tested: ") if lines else ""
    if report.failed and not isinstance(call.excinfo.value, AssertionError):
        text = f"{call.excinfo.typename}: {text}"
    # A kit that knows the broken rule reports it itself.
    if report.failed and not text.startswith("law ") and (rules := plugin.rules_of(item)):
        text = f"law {', '.join(rules)}: {text}"
    return text[:300] or call.excinfo.typename
