"""First contact: `fdcore` alone, and `fdcore serve` without a model."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.cli.models import models as commands
from fd_core.cli.models.models import choose_model
from fd_core.errors import ConfigError, PluginError
from fd_core.models.catalog import ListedModel
from fd_core.plugins import Plugins

ABSENT = ListedModel("smollm2", "small", 98_000_000, None)
HERE = ListedModel("org/large", "from Hugging Face", 3_000_000_000, Path("/snapshots/large"))


@pytest.fixture
def two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fd_core.models.catalog.list_models", lambda checked: [ABSENT, HERE])


def test_fdcore_alone_suggests_a_command_and_lists_models(two_models: None) -> None:
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0
    assert "  fdcore serve org/large " in shown.output
    assert "Model    org/large (3,000 MB, local) and 1 more" in shown.output
    assert "Backend  " in shown.output
    assert len(shown.output.splitlines()) < 15
    assert max(map(len, shown.output.splitlines())) < 120


def test_fdcore_alone_without_a_backend_explains_what_to_do(two_models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Plugins, name: str = "auto") -> None:
        raise PluginError("no backend can run here", hint="pip install 'fd-core[cpu]'")

    monkeypatch.setattr(Plugins, "choose_backend", none)
    shown = CliRunner().invoke(app, [])
    assert (shown.exit_code, shown.exception) == (0, None)
    assert "Backend  no backend can run here (pip install 'fd-core[cpu]')" in shown.output


@pytest.mark.parametrize("command", [[], ["serve"], ["env"]])
def test_unknown_home_folder_is_a_one_line_error(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_CACHE", "~no-such-user/cache")
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 2
    assert shown.stderr.startswith("fdcore: FD_CACHE: the home folder in '~no-such-user/cache' is unknown")


def test_terminal_without_unicode_shows_the_rest(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "fd_core.cli", "models", "list"],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "36", "PYTHONIOENCODING": "ascii", "FD_CACHE": str(tmp_path)},
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"98 MB" in ended.stdout


def test_serve_without_a_model_lists_models_if_not_interactive(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "fd_core.cli", "serve"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "FD_CACHE": str(tmp_path), "HF_HOME": str(tmp_path)},
    )
    assert ended.returncode == 2
    assert "smollm2 (98 MB, fetched on first use)" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "typed, chosen",
    [("2\n", "smollm2"), ("\n", "org/large"), ("a/folder\n", "a/folder"), ("7\n0\n2\n", "smollm2")],
)
def test_serve_without_a_model_prompts_at_a_terminal(
    two_models: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, chosen: str
) -> None:
    monkeypatch.setattr(commands, "_at_a_terminal", lambda: True)
    master, slave = pty.openpty()
    os.write(master, typed.encode())
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert choose_model("fdcore serve") == chosen
    os.close(master)
    assert f"next time: fdcore serve {chosen}" in capsys.readouterr().err


def test_end_of_input_at_the_prompt_is_an_error_with_the_list(
    two_models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_at_a_terminal", lambda: True)
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(ConfigError, match=r"org/large \(3,000 MB, local\); smollm2 \(98 MB, fetched"):
            choose_model("fdcore serve")
