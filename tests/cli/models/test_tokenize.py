"""`fdcore tokenize`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fd_core.cli.app import app


@pytest.mark.parametrize(
    ("arguments", "given", "written"),
    [
        (["hi"], None, "71\t'h'\n72\t'i'\n"),
        (["hi", "--ids"], None, "71 72\n"),
        (["--ids"], "hi", "71 72\n"),
    ],
)
def test_text_becomes_tokens(arguments: list[str], given: str | None, written: str) -> None:
    result = CliRunner().invoke(app, ["tokenize", "--model", "bytes", *arguments], input=given)
    assert (result.exit_code, result.stdout, result.stderr) == (0, written, "2 tokens\n")


def test_text_may_be_a_user_message() -> None:
    alone = CliRunner().invoke(app, ["tokenize", "--model", "bytes", "--ids", "hi"]).stdout.split()
    chat = CliRunner().invoke(app, ["tokenize", "--model", "bytes", "--ids", "--chat", "hi"]).stdout.split()
    assert len(chat) > len(alone)
    assert " ".join(alone) in " ".join(chat)


def test_missing_model_is_named() -> None:
    result = CliRunner().invoke(app, ["tokenize", "--model", "./nowhere", "hi"])
    assert result.exit_code == 3
    assert "nowhere" in result.output


def test_environment_is_shown_under_both_names() -> None:
    shown = [CliRunner().invoke(app, [name, "--help"]).stdout for name in ("env", "collect-env")]
    assert all("backends and caches" in text or "fdcore env" in text for text in shown)
