"""Runs the suite in one process per backend, which isolates frameworks, crashes and hangs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

import fd_core
from fd_core.errors import FdError
from fd_core.plugins import POSTPROCESS, REASONING_PARSER, SCHEDULER, TOOL_PARSER, Kind, installed_plugins
from fd_core.testing.kit.processes import RunEnd, follow
from fd_core.testing.kit.target import environment_of, find_target
from fd_core.testing.report.model import (
    OF_OTHERS_THAN_SCHEDULERS,
    PARSER_SECTIONS,
    SECTIONS,
    Card,
    ConformanceReport,
    Result,
)
from fd_core.testing.report.recorder import BackendDescribed, CaseEnded, CasesLeftOut, CaseStarted, RecordedEvent


@dataclass(frozen=True, slots=True)
class Kit:
    """A suite of cases for one kind of plugin."""

    suite: str
    option: str
    quick: tuple[str, ...]
    """Arguments that exclude slow tests."""
    sections: tuple[str, ...]
    find: Callable[[str], object]
    """Looks up the plugin under test without importing it. Raises `FdError`."""
    others: Mapping[str, str] = field(default_factory=dict)


def _found(kind: Kind[Any]) -> Callable[[str], object]:
    return lambda name: installed_plugins().find(kind, name)


BACKENDS: Final = Kit(
    "fd_core.testing.suite", "--fd-backend", ("-m", "not fd_scale and not fd_pairs"), SECTIONS, find_target
)
_PARSERS: Final = "fd_core.testing.parsers.suite"
KITS: Final = (
    BACKENDS,
    Kit(
        "fd_core.testing.schedulers.suite",
        "--fd-scheduler",
        ("--fd-quick", "-m", "not fd_pairs"),
        sections=("signals", "budget", "blocks", "golden", "storage", "pairs", "cases", "lifetime"),
        find=_found(SCHEDULER),
        others=OF_OTHERS_THAN_SCHEDULERS,
    ),
    Kit(
        "fd_core.testing.postprocessors.suite",
        "--fd-postprocess",
        (),
        sections=("matrix", "flight", "device"),
        find=lambda text: installed_plugins().find(POSTPROCESS, text.partition(":")[0]),
    ),
    Kit(_PARSERS, "--fd-tool-parser", (), sections=(*PARSER_SECTIONS, "calls"), find=_found(TOOL_PARSER)),
    Kit(_PARSERS, "--fd-reasoning-parser", (), sections=(*PARSER_SECTIONS, "reasoning"), find=_found(REASONING_PARSER)),
)
"""Kits in the order of `fdcore conformance`."""

_QUIET_SECONDS: Final = 600.0
"""Seconds without a new result after which the suite counts as hanging."""
RunProgress = Callable[[str, int, int], None]
"""Called with (target, tests done, tests that failed)."""


def run_suite(
    targets: Sequence[str],
    expression: str | None,
    command: str,
    progress: RunProgress,
    *,
    quick: bool = False,
    kit: Kit = BACKENDS,
) -> ConformanceReport:
    """Run the suite for each target, one after the other.

    `expression` is pytest's `-k`; `quick` excludes slow tests.
    """
    return ConformanceReport(
        fd_core=fd_core.__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        command=command,
        cards=[_card(kit, target, expression, quick=quick, progress=progress) for target in targets],
    )


def _card(kit: Kit, target: str, expression: str | None, quick: bool, progress: RunProgress) -> Card:
    started = time.monotonic()
    try:
        kit.find(target)  # starting pytest takes seconds
    except FdError as error:
        return _card_of(kit, target, error=f"{target}: {error}".splitlines()[0], seconds=time.monotonic() - started)
    run = _Run()
    with tempfile.TemporaryDirectory(prefix="fdcore-conformance-") as name:
        folder = Path(name)
        environment = os.environ | environment_of(target)
        progress(target, 0, 0)
        for event in follow(
            _command(kit, target, expression, quick=quick, folder=folder),
            folder / "results",
            RecordedEvent,
            most_quiet_seconds=_QUIET_SECONDS,
            output=folder / "output",
            stdin=subprocess.DEVNULL,
            env=environment | {"HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis")},
        ):
            if run.add(event):
                progress(target, len(run.results), run.failed)
        output = (folder / "output").read_text(errors="replace")
    return run.card(kit, target, output, seconds=time.monotonic() - started)


def _command(kit: Kit, target: str, expression: str | None, quick: bool, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-p", "fd_core.testing.report.recorder", "-p", "no:cacheprovider"]
    # Files in the user's working folder must not affect the test run.
    (folder / "pytest.ini").write_text("[pytest]\n")
    command += ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--basetemp", str(folder / "files")]
    command += ["--pyargs", kit.suite, f"{kit.option}={target}", f"--fd-results={folder / 'results'}"]
    command += ["-q", "--tb=short", *(("-k", expression) if expression else ())]
    return [*command, *kit.quick] if quick else command


@dataclass
class _Run:
    """Summary of the events of one process."""

    about: BackendDescribed | None = None
    results: dict[tuple[str, str], Result] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    running: CaseStarted | None = None
    code: int = 0
    silent: bool = False

    @property
    def failed(self) -> int:
        return sum(result.outcome == "fail" for result in self.results.values())

    def add(self, event: RecordedEvent | RunEnd) -> bool:
        """Process an event; return True if a test ended."""
        match event:
            case BackendDescribed():
                self.about = event
            case CaseStarted():
                self.running = event
            case RunEnd():
                self.code, self.silent = event
            case CasesLeftOut():
                self.left_out[event.section] += event.count
            case CaseEnded():
                # A failure in teardown overrides the outcome of the test.
                self.results[event.result.section, event.result.test] = event.result
                self.running = None
                return True
        return False

    def card(self, kit: Kit, target: str, output: str, seconds: float) -> Card:
        """Return the card of the run; `output` is the output of its process."""
        error, running, code, silent = None, self.running, self.code, self.silent
        if silent or code < 0:
            how = "timed out" if silent else f"ended the process with signal {-code}"
            if running is not None:
                self.results[running.section, running.test] = Result(
                    section=running.section, test=running.test, outcome="fail", reason=f"it {how}"
                )
            error = f"{'a test' if running is None else running.test} {how}; later tests were not run"
        elif code not in (0, 1):
            lines = [line for line in output.splitlines() if line.strip()]
            reasons = [
                line.strip("! ").removeprefix("_pytest.outcomes.Exit: ") for line in lines if line.startswith("!")
            ]
            error = (reasons or lines or ["pytest could not be run"])[-1]
        about = {} if self.about is None else msgspec.structs.asdict(self.about)
        return _card_of(
            kit,
            target,
            error=error,
            seconds=seconds,
            results=list(self.results.values()),
            deselected=dict(self.left_out),
            **about,
        )


def _card_of(kit: Kit, target: str, *, seconds: float, **parts: Any) -> Card:
    return Card(target=target, sections=kit.sections, others=dict(kit.others), seconds=round(seconds, 1), **parts)
