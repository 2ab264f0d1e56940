"""Peers' Python environments: passed by the user, or created on demand with exact versions."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from .engines import Environment

REPOSITORY = Path(__file__).resolve().parents[2]


class EnvironmentFailedError(Exception):
    """A peer's environment could not be created; the message names the log."""


def python_of(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def ensure(environment: Environment, folder: Path) -> Path:
    """Return the interpreter of `environment` under `folder`; create and fill the environment if it is missing."""
    if environment.given:
        raise EnvironmentFailedError(f"name the folder of its environment with --env {environment.name}=DIR")
    home = folder / environment.name
    done = home / ".installed"
    wanted = repr(environment)
    if done.exists() and done.read_text() == wanted:
        return python_of(home)
    venv.create(home, with_pip=True, clear=True)
    log = folder / f"{environment.name}.log"
    sources = ["-e", f"{REPOSITORY}[cpu]"] if environment.editable_repository else []
    commands = [["install", *environment.build_tools]] if environment.build_tools else []
    commands.append(["install", *sources, *environment.install])
    if environment.without:
        commands.append(["uninstall", "--yes", *environment.without])
    scripts = python_of(home).parent
    variables = os.environ | environment.build_variables | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    with log.open("w") as output:
        for command in commands:
            finished = subprocess.run(
                [str(python_of(home)), "-m", "pip", *command],
                stdout=output,
                stderr=output,
                env=variables,
                check=False,
            )
            if finished.returncode != 0:
                raise EnvironmentFailedError(f"pip {command[0]} failed for {environment.name!r}; see {log}")
    done.write_text(wanted)
    return python_of(home)
