"""Runs the suite, one process for each backend: frameworks do not meet, and a crash or a hang is one backend's."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import fd_core
from fd_core.testing.kit.target import environment_of
from fd_core.testing.report.model import (
    OF_OTHERS_THAN_SCHEDULERS,
    PARSER_SECTIONS,
    POSTPROCESS_SECTIONS,
    SCHEDULER_SECTIONS,
    SECTIONS,
    Card,
    ConformanceReport,
    Result,
)
from fd_core.testing.report.recorder import BackendDescribed, CaseEnded, CasesLeftOut, CaseStarted, read_events

__all__ = ["BACKENDS", "KITS", "Kit", "run_suite"]


@dataclass(frozen=True, slots=True)
class Kit:
    """A suite of cases for one kind of plugin."""

    suite: str
    """The package."""
    option: str
    """Names what is tested."""
    quick: tuple[str, ...]
    """Arguments that leave out what takes long."""
    sections: tuple[str, ...]
    others: Mapping[str, str] = field(default_factory=dict)
    """Rules that nothing of this kind can break, with what keeps them."""


BACKENDS: Final = Kit("fd_core.testing.suite", "--fd-backend", ("-m", "not fd_scale"), SECTIONS)
SCHEDULERS: Final = Kit(
    "fd_core.testing.schedulers.suite",
    "--fd-scheduler",
    ("--fd-quick",),
    SCHEDULER_SECTIONS,
    OF_OTHERS_THAN_SCHEDULERS,
)
POSTPROCESSORS: Final = Kit("fd_core.testing.postprocessors.suite", "--fd-postprocess", (), POSTPROCESS_SECTIONS)
_PARSERS: Final = "fd_core.testing.parsers.suite"
KITS: Final = (
    BACKENDS,
    SCHEDULERS,
    POSTPROCESSORS,
    Kit(_PARSERS, "--fd-tool-parser", (), (*PARSER_SECTIONS, "calls")),
    Kit(_PARSERS, "--fd-reasoning-parser", (), (*PARSER_SECTIONS, "reasoning")),
)
"""In the order in which `fdcore conformance` names them."""

_QUIET_SECONDS: Final = 600.0
"""Seconds without a new result after which the suite counts as hanging."""
_USAGE_CODES: Final = {1, 0}
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

    `expression` is pytest's `-k`; `quick` leaves out what takes long.
    """
    return ConformanceReport(
        fd_core=fd_core.__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        command=command,
        cards=[_card(kit, target, expression, quick, progress) for target in targets],
    )


def _card(kit: Kit, target: str, expression: str | None, quick: bool, progress: RunProgress) -> Card:
    with tempfile.TemporaryDirectory(prefix="fdcore-conformance-") as name:
        folder = Path(name)
        started = time.monotonic()
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                _command(kit, target, expression, quick, folder),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | environment_of(target) | {"HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis")},
            )
            try:
                hung = _watch(process, folder / "results", target, progress)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        said = (folder / "output").read_text(errors="replace")
        return _judge(kit, target, folder / "results", process.returncode, said, hung, time.monotonic() - started)


def _command(kit: Kit, target: str, expression: str | None, quick: bool, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-p", "fd_core.testing.report.recorder", "-p", "no:cacheprovider"]
    # Nothing of the folder that the user happens to be in may change what is tested.
    command += ["-c", str(_empty_settings(folder)), "--rootdir", str(folder), "--basetemp", str(folder / "files")]
    command += ["--pyargs", kit.suite, f"{kit.option}={target}", f"--fd-results={folder / 'results'}"]
    command += ["-q", "--tb=short", *(("-k", expression) if expression else ())]
    return [*command, *kit.quick] if quick else command


def _empty_settings(folder: Path) -> Path:
    path = folder / "pytest.ini"
    path.write_text("[pytest]\n")
    return path


def _watch(process: subprocess.Popen[bytes], results: Path, target: str, progress: RunProgress) -> bool:
    """Wait until the process ends; return whether it was killed because it hung."""
    size, changed = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = results.stat().st_size if results.exists() else 0
        if now != size:
            size, changed = now, time.monotonic()
            ended = [event for event in read_events(results) if isinstance(event, CaseEnded)]
            progress(target, len(ended), sum(event.result.outcome == "fail" for event in ended))
        elif time.monotonic() - changed > _QUIET_SECONDS:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
    return False


def _judge(kit: Kit, target: str, path: Path, code: int, said: str, hung: bool, seconds: float) -> Card:
    about: BackendDescribed | None = None
    results: dict[tuple[str, str], Result] = {}
    left_out: dict[str, int] = {}
    running: CaseStarted | None = None
    for event in read_events(path):
        match event:
            case BackendDescribed():
                about = event
            case CaseStarted():
                running = event
            case CasesLeftOut():
                left_out[event.section] = left_out.get(event.section, 0) + event.count
            case CaseEnded():
                key = event.result.section, event.result.test
                # A failure while cleaning up counts, whatever the test came to before.
                results[key] = event.result
                running = None
    error = None
    if hung or code < 0:
        how = "took too long" if hung else f"ended the process with signal {-code}"
        if running is not None:
            results[running.section, running.test] = Result(
                section=running.section, test=running.test, outcome="fail", reason=f"it {how}"
            )
        error = f"{'a test' if running is None else running.test} {how}; what follows it was not run"
    elif code not in _USAGE_CODES:
        lines = [line for line in said.splitlines() if line.strip()]
        told = [line.strip("! ").removeprefix("_pytest.outcomes.Exit: ") for line in lines if line.startswith("!")]
        error = (told or lines or ["pytest could not be run"])[-1]
    return Card(
        target=target,
        device="" if about is None else about.device,
        dtype="" if about is None else about.dtype,
        distribution="" if about is None else about.distribution,
        emulated=about is not None and about.emulated,
        limits={} if about is None else about.limits,
        error=error,
        seconds=round(seconds, 1),
        results=list(results.values()),
        sections=kit.sections,
        deselected=left_out,
        others=dict(kit.others),
    )
