"""`fdcore env` prints the reasons of plugins unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fd_core.backends.contract import Availability
from fd_core.backends.cpu import CpuBackend
from fd_core.cli.app import app


def test_brackets_in_a_reason_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "probe", lambda: Availability(False, "pip install 'x[cpu]'"))
    shown = CliRunner().invoke(app, ["env"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "pip install 'x[cpu]'" in shown.stdout


def test_unreadable_cache_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: object) -> object:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setenv("FD_CACHE", "/somewhere")
    monkeypatch.setattr(Path, "is_dir", refuse)
    shown = CliRunner().invoke(app, ["env"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "/somewhere: permission denied" in shown.stdout


def test_default_sizes_of_backends_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "default_num_seqs", 77)
    shown = CliRunner().invoke(app, ["env"], env={"COLUMNS": "200"})
    line = next(line for line in shown.stdout.splitlines() if " 77 " in line)
    assert [cell.strip() for cell in line.split("│")[1:4]] == ["77", "512", "cpu"]
