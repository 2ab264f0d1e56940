"""The command `fdcore` without a process of its own."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest

from fd_core.cli.main import main


@pytest.fixture
def entered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `main` with arguments, as the script does, and returns what the process would show.

    A process imports the core for each message, 0.5 to 2 CPU seconds; what ends the process itself still needs one.
    """

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["fdcore", *arguments])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # `main` replaces it
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, shown.out, shown.err)

    return run
