"""Python environments of the compared engines: named by the user, present, or made on demand with exact versions."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

from fd_core.cli.bench.compare.engines import Environment
from fd_core.cli.bench.compare.processes import end_with_parent


class EnvironmentFailedError(Exception):
    """An environment is missing or could not be made; the message has the remedy or the log."""


def python_of(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def find(
    environment: Environment,
    folder: Path,
    given: Mapping[str, Path],
    *,
    install: bool,
    report: Callable[[str], object] = print,
) -> Path:
    """Return the interpreter, or the server on the PATH, that runs the engine of an environment.

    `given` has folders that the user named, `folder` the environments that were made here. One that is missing is made
    with `install`, after a `report` of what is installed, otherwise `EnvironmentFailedError` names the flag.
    """
    if environment.name in given:
        python = python_of(given[environment.name])
        if not python.exists():
            raise EnvironmentFailedError(f"--env {environment.name}={given[environment.name]} has no {python}")
        return python
    home = folder / environment.name
    done = home / ".installed"
    if environment.install and done.exists() and done.read_text() == repr(environment):
        return python_of(home)
    if environment.program and (program := shutil.which(environment.program)):
        return Path(program)
    if environment.module and importlib.util.find_spec(environment.module):
        return Path(sys.executable)
    if not environment.install:
        raise EnvironmentFailedError(f"name the folder of its environment with --env {environment.name}=DIR")
    if not install:
        raise EnvironmentFailedError(
            f"not installed; --install installs {environment.package} in {home} ({environment.size}), "
            f"--env {environment.name}=DIR uses an environment that has it"
        )
    report(f"installing {environment.package} ({environment.size}), which takes minutes; pip writes to {_log_of(home)}")
    _make(environment, home)
    done.write_text(repr(environment))
    return python_of(home)


def _log_of(home: Path) -> Path:
    return home / "install.log"


def _make(environment: Environment, home: Path) -> None:
    venv.create(home, with_pip=True, clear=True)
    commands = [["install", *environment.build_tools]] if environment.build_tools else []
    commands.append(["install", *environment.install])
    if environment.without:
        commands.append(["uninstall", "--yes", *environment.without])
    python, log = python_of(home), _log_of(home)
    variables = os.environ | environment.build_variables | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    with log.open("w") as output:
        for command in commands:
            pip = [str(python), "-m", "pip", *command]
            finished = subprocess.run(
                pip, stdout=output, stderr=output, env=variables, check=False, preexec_fn=end_with_parent
            )
            if finished.returncode != 0:
                raise EnvironmentFailedError(f"pip {command[0]} failed; see {log}")
