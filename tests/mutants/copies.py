"""Copies of the package with and without a fault, and pytest runs on them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.mutants.groups import ROOT, Group
from tests.mutants.mutant import Mutant
from tests.mutants.quick import Began, Ended, Line, Order
from tests.mutants.session import GroupLimits, GroupRun, RunGroup, SessionFault

__all__ = ["mutated", "pristine", "runner"]

_LINE = msgspec.json.Decoder(Line)


@contextmanager
def pristine() -> Iterator[Path]:
    """Yield a fault-free copy of the package and its tests, in which compiled files are kept for other copies."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", "*.so", ".*")
        shutil.copytree(ROOT / "fd_core", copy / "fd_core", ignore=ignored)
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        yield copy


@contextmanager
def mutated(original: Path, mutant: Mutant) -> Iterator[Path]:
    """Yield a copy of `original` with the fault. Raises `DoesNotApply` if the quoted code no longer exists."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(original, copy)
        mutant.apply(copy / "fd_core")
        for edit in mutant.edits:
            # Python detects changed files by size and time in whole seconds, both of which may be equal.
            source = copy / "fd_core" / edit.file
            for compiled in source.parent.glob(f"__pycache__/{source.stem}.*.pyc"):
                compiled.unlink()
        yield copy


def runner(copy: Path, *options: str) -> RunGroup:
    """Return a function that runs groups of tests on `copy`, each in a separate process with further pytest options."""

    def run(group: Group, limits: GroupLimits, skip: frozenset[str]) -> GroupRun:
        with tempfile.TemporaryDirectory(prefix="mutant-run-") as folder:
            return _run(copy, Path(folder), group, limits, skip, options)

    return run


def _run(
    copy: Path, scratch: Path, group: Group, limits: GroupLimits, skip: frozenset[str], options: tuple[str, ...]
) -> GroupRun:
    report, order = scratch / "report.jsonl", scratch / "order.json"
    order.write_bytes(msgspec.json.encode(Order(str(report), dict(limits.tests), limits.other_tests, skip)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.mutants.quick",
    ]
    # Without its own rootdir, pytest would take settings and test names from the parent folders.
    command += [f"--rootdir={copy}", f"--mutant-order={order}", f"--basetemp={scratch / 'tmp'}"]
    command += [*options, *group.files]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    code, text = _finished(command, copy, environment, limits.group)
    seconds = time.monotonic() - began
    lines = [_LINE.decode(line) for line in report.read_bytes().splitlines()] if report.exists() else []
    ended = {line.test: line for line in lines if isinstance(line, Ended)}
    passed = {name: line.seconds for name, line in ended.items() if line.outcome == "passed"}
    for name, line in ended.items():
        if line.outcome != "passed":
            failed, hung = (name, None) if line.outcome == "failed" else (None, name)
            return GroupRun(seconds, passed, failed, hung)
    if code is None:
        running = [line.test for line in lines if isinstance(line, Began) and line.test not in ended]
        return GroupRun(seconds, passed, hung=running[0] if running else group.name)
    # If all remaining tests were deselected, pytest finds none, which is no failure.
    if code != 0 and not (code == 5 and skip):
        raise SessionFault(f"pytest ended with {code} on the group {group.name}:\n{text[-2000:]}")
    return GroupRun(seconds, passed)


def _finished(command: list[str], folder: Path, environment: dict[str, str], limit: float) -> tuple[int | None, str]:
    """Return exit code and output; after `limit` seconds the code is None and all processes of the run are killed."""
    # Output goes to a file: processes that a test leaks would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return code, output.read()
