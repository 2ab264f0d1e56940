"""Runs of a kit on an edited module, each in a process forked from one that has imported what is never edited."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.testing.mutation.edits import Edit
from tests.testing.mutation.finder import ROOT, EditedModules


def outcome(module: str, edit: Edit | None, runs: Sequence[Sequence[str]], folder: Path, seconds: float) -> str:
    """Run the kit until one of `runs` fails: `killed`, `hangs`, `does not load` or `survives`."""
    for arguments in runs:
        child = os.fork()
        if child == 0:
            _run(module, edit, arguments, folder)
        found = _wait(child, seconds)
        if found != "survives":
            return found
    return "survives"


def _run(module: str, edit: Edit | None, arguments: Sequence[str], folder: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with (folder / f"output{os.getpid()}").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    finder = EditedModules(module, edit)
    # Processes that it starts import `sitecustomize` from there.
    os.environ |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "FD_EDIT": finder.encoded(), "FD_TEST_EXAMPLES": "all"}
    sys.path.insert(0, str(folder))
    os.chdir(folder)  # a mutant may write anywhere
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--basetemp", str(folder / f"files{os.getpid()}")]
    options += ["-c", str(folder / "pytest.ini"), "--rootdir", str(ROOT)]
    os._exit(int(pytest.main([*options, *map(_absolute, arguments)], plugins=[_Install(finder)])))


def _absolute(argument: str) -> str:
    return str(ROOT / argument) if argument.startswith("tests/") else argument


class _Install:
    """A plugin that puts a finder before that of pytest, which rewrites every module of the core."""

    def __init__(self, finder: EditedModules) -> None:
        self._finder = finder

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        sys.meta_path.insert(0, self._finder)

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        """Report a failing case without reducing it, which takes up to 20 seconds."""
        from fd_core.testing.axes import parts

        vars(parts)["_SECONDS_TO_REDUCE"] = -1.0


def _wait(child: int, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            # Not every kit has tests for every run.
            known = {pytest.ExitCode.OK: "survives", pytest.ExitCode.NO_TESTS_COLLECTED: "survives", 1: "killed"}
            return known.get(code, "killed" if code < 0 else "does not load")
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"
