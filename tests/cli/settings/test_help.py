"""Help of commands with settings: groups, the most used settings first, and everything with --help-all."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.cli.settings.flags import COMMON, ENGINE_FLAGS, GATEWAY_FLAGS, ROUTER_FLAGS, SERVER_FLAGS, Flag
from fd_core.cli.settings.settings import merge

RunCli = Callable[..., subprocess.CompletedProcess[str]]


def sections(text: str) -> dict[str, list[str]]:
    """Return the flags at the beginning of the lines of each section of a help text."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(" "):
            found[line.rstrip(":")] = rows = []
        elif match := re.match(r"  (?:-\w+, )?(--[a-z-]+)", line):
            rows.append(match[1])
    return found


def help_of(*arguments: str) -> str:
    shown = CliRunner().invoke(app, [*arguments], prog_name="fdcore", terminal_width=80)
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.mark.parametrize(
    "flag", (*ENGINE_FLAGS, *SERVER_FLAGS, *GATEWAY_FLAGS, *ROUTER_FLAGS), ids=lambda flag: flag.key
)
def test_every_setting_has_a_group(flag: Flag) -> None:
    assert flag.group != "Options"


def test_help_explains_the_twelve_most_used_settings_and_names_the_others() -> None:
    text = help_of("serve", "--help")
    common = sections(text)[COMMON]
    assert len(common) == 12 and {"--host", "--port", "--dtype", "--max-model-len"} <= set(common)
    assert "More settings, explained by fdcore serve --help-all:" in text
    named = set(re.findall(r"--[a-z-]+", text))
    assert named >= {flag.flag for flag in (*ENGINE_FLAGS, *SERVER_FLAGS)}
    assert re.search(r"^  KV cache: .*--block-size", text, re.MULTILINE)


@pytest.mark.parametrize("command", ["serve", "route", "chat", "run", "complete", "run-batch"])
def test_help_all_explains_every_setting_in_its_group(command: str) -> None:
    shown = sections(help_of(command, "--help-all"))
    brief = sections(help_of(command, "--help"))
    assert list(shown)[-1] != COMMON and len(shown) > len(brief)
    for flag in (*ENGINE_FLAGS, *SERVER_FLAGS):
        titles = [title for title, flags in shown.items() if flag.flag in flags]
        assert titles in ([], [COMMON if flag.common else flag.group]) or flag.flag == "--api-key-file"
    assert "More settings" not in help_of(command, "--help-all")


def test_flags_may_have_underscores(run_cli: RunCli) -> None:
    ended = run_cli("serve", "smollm2", "--max_num_seqs=none")
    assert (ended.returncode, ended.stderr) == (2, "fdcore: --max-num-seqs: expected an integer, got 'none'\n")
    assert run_cli("run_batch", "--help").returncode == 0


@pytest.mark.parametrize(
    ("alias", "dtype"),
    [("half", "float16"), ("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"), ("float", "float32")],
)
def test_dtypes_have_their_usual_short_names(alias: str, dtype: str) -> None:
    assert merge("smollm2", {"dtype": alias}, {}).engine.dtype == dtype
    assert merge("smollm2", {}, {"FD_DTYPE": alias}).engine.dtype == dtype


@pytest.mark.parametrize(("text", "tokens"), [("32k", 32_000), ("1M", 1_000_000), ("32Ki", 32_768), ("1.5k", 1500)])
def test_numbers_may_have_units(text: str, tokens: int) -> None:
    assert merge("smollm2", {"max_model_len": text}, {}).engine.max_model_len == tokens


def test_shells_complete_commands_flags_and_values() -> None:
    def completed(words: str) -> list[str]:
        environment = {"_FDCORE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return CliRunner().invoke(app, [], prog_name="fdcore", env=environment).output.split()

    assert "serve" in completed("fdcore se")
    assert completed("fdcore serve --max-num-s") == ["--max-num-seqs"]
    assert completed("fdcore serve --dtype bf") == ["bfloat16"]
