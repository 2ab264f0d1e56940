"""Runs the fast tests on the null backend against one mutated copy of the package at a time."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant

__all__ = ["SessionFault", "Verdict", "files_in_order", "run"]

ROOT = Path(__file__).parents[2]
FIRST = (
    "tests/test_signals.py",
    "tests/test_config.py",
    "tests/test_breaker.py",
    "tests/kv",
    "tests/scheduling",
    "tests/runner",
    "tests/engine/test_outputs.py",
    "tests/engine/test_streams.py",
    "tests/engine/test_ledger.py",
    "tests/engine/test_incidents.py",
    "tests/engine/test_storage.py",
    "tests/kv/stores/test_envelope.py",
    "tests/engine",
    "tests/kv/tiers",
    "tests/router",
    "tests/router/gateway/test_pairs.py",
    *(f"tests/disagg/test_{name}.py" for name in ("decode_lease", "lease", "lease_liveness", "lease_machine")),
    *(f"tests/disagg/test_{name}.py" for name in ("prefill_lease", "terms", "ticket")),
)
"""Cheapest first, so that most mutants die within seconds; before all, what mirrors a mutant's files and folders."""
LEFT_OUT = ("tests/engine/test_process.py", "tests/engine/test_restarts.py")
"""Wait for processes and the clock; what they add to the others is not about the protocol's core."""
SECONDS_PER_TEST = 60
SECONDS_PER_MUTANT = 180
_CULPRIT = re.compile(r"^(?:FAILED|ERROR) (\S+)(.*)", re.MULTILINE)


class SessionFault(RuntimeError):
    """The tests could not be run, which says nothing about a mutant."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one run; `killer` is None if every test passed."""

    killer: str | None


def files_in_order(mutant: Mutant | None = None) -> list[str]:
    """Return the test files in the order in which they run against `mutant`."""
    found: dict[str, None] = {}
    for place in FIRST:
        path = ROOT / place
        files = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
        found.update(dict.fromkeys(file.relative_to(ROOT).as_posix() for file in files))
    chosen = [name for name in found if name not in LEFT_OUT]
    mutated = [Path("tests", edit.file) for edit in mutant.edits] if mutant else []
    files = {path.with_name(f"test_{path.name}") for path in mutated}
    folders = {path.parent for path in mutated}
    return sorted(chosen, key=lambda name: (Path(name) not in files, Path(name).parent not in folders))


def run(mutant: Mutant | None) -> Verdict:
    """Run the tests against a copy with the fault, or without one if `mutant` is None.

    Raises `DoesNotApply` if the code has moved away from the mutant, and `SessionFault` if pytest could not run.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "csrc", ".*")
        shutil.copytree(ROOT / "fd_core", copy / "fd_core", ignore=ignored)
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        if mutant is not None:
            mutant.apply(copy / "fd_core")
        return _judge(copy, files_in_order(mutant))


def _judge(copy: Path, files: list[str]) -> Verdict:
    command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "-rfE", "--durations=0", "-p", "no:cacheprovider"]
    command += ["-p", "tests.mutants.quick", f"--timeout={SECONDS_PER_TEST}", *files]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    code, text = _finished(command, copy, environment)
    if code is None:
        return Verdict(f"timeout after {SECONDS_PER_MUTANT} s")
    if code == 0:
        return Verdict(None)
    culprits = list(_culprits(text))
    if code != 1 or not culprits:
        raise SessionFault(f"pytest ended with {code}:\n{text[-2000:]}")
    return Verdict(culprits[0])


def _finished(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int | None, str]:
    """Return exit code and output; on a hang the code is None and every process of the run is gone."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS_PER_MUTANT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
        return process.returncode, output


def _culprits(text: str) -> Iterator[str]:
    for match in _CULPRIT.finditer(text):
        yield f"{match[1]} (timeout)" if "Timeout" in match[2] else match[1]
