"""Runs of a kit on an edited module, each in a process forked from one that has imported what is never edited."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from tests.testing.mutation.edits import Edit

ROOT: Final = Path(__file__).parents[3]
_ORACLE: Final = "fd_core.ops.numpy"
_COPY: Final = "fd_mutant"
"""Package of the edited pack: the oracle of the kit stays what it is."""


def path_of(module: str) -> Path:
    """Return the file of a module of the core."""
    return ROOT / (module.replace(".", "/") + ".py")


class EditedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module of the core with an edit, and the copy of the oracle's pack."""

    def __init__(self, module: str, edit: Edit | None) -> None:
        self._module, self._edit = module, edit

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name == _COPY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        edited = name == self._module and not name.startswith(_ORACLE)
        if not edited and not name.startswith(f"{_COPY}."):
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(path_of(self._source_of(name))))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _COPY:
            return
        name = self._source_of(module.__name__)
        source = path_of(name).read_text()
        if name == self._module and self._edit is not None:
            source = self._edit.applied(source)
        source = source.replace(f"{_ORACLE}.", f"{_COPY}.") if module.__name__.startswith(_COPY) else source
        module.__file__ = str(path_of(name))
        exec(compile(source, module.__file__, "exec"), module.__dict__)

    @staticmethod
    def _source_of(name: str) -> str:
        return name.replace(_COPY, _ORACLE) if name.startswith(_COPY) else name


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
    sys.path.insert(0, str(folder))
    os.chdir(folder)  # a mutant may write anywhere
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--basetemp", str(folder / f"files{os.getpid()}")]
    options += ["-c", str(folder / "pytest.ini"), "--rootdir", str(ROOT)]
    os._exit(int(pytest.main([*options, *map(_absolute, arguments)], plugins=[_Install(EditedModules(module, edit))])))


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
            return {0: "survives", 1: "killed"}.get(code, "killed" if code < 0 else "does not load")
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"
