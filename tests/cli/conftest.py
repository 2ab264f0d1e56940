"""The `fdcore` command, run in this process."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest

from fd_core.cli.main import main
from fd_core.config.logs import ACCESS_LOGGER
from tests.engine.conftest import faults  # noqa: F401 - a fixture


@pytest.fixture
def run_cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Return a function that runs `main` with arguments, as the script does, and returns the output of such a process.

    A new process would spend 0.5 to 2 CPU seconds on imports; tests of the process exit itself still start one.
    """

    levels = {name: logging.getLogger(name).level for name in (ACCESS_LOGGER, "uvicorn")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["fdcore", *arguments])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # `main` replaces it
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, shown.out, shown.err)

    yield run
    for name, level in levels.items():  # commands that serve change them
        logging.getLogger(name).setLevel(level)
