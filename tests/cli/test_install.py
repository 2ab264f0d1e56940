"""`fdcore install`: what a user is told after pip has ended."""

import subprocess

import pytest
import typer

from fd_core.cli.plugins import plugins
from fd_core.errors import PluginError


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; pip and the check end with the codes of `CODES`."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, CODES.get((command[-2], command[-1]), 0))

    monkeypatch.setattr(plugins.subprocess, "run", run)
    return commands


CODES = {("--", "nosuch"): 1, ("check", "fd-broken"): 4}


@pytest.mark.parametrize(
    ("name", "distribution"),
    [("storage_redis", "fd-storage-redis"), ("fd-mychip==1.2", "fd-mychip"), ("fd-mychip", "fd-mychip")],
)
def test_only_what_was_installed_is_shown(ran: list[list[str]], name: str, distribution: str) -> None:
    plugins.install.__wrapped__(name)
    assert len(ran) == 2 and ran[1][-3:] == ["plugins", "check", distribution]


def test_a_name_that_pip_does_not_know_gets_the_names_of_the_projects_plugins(ran: list[list[str]]) -> None:
    with pytest.raises(PluginError, match=r"could not install nosuch; .* \(the project's own plugins are gpu_cuda, "):
        plugins.install.__wrapped__("nosuch")
    assert len(ran) == 1


def test_a_plugin_that_cannot_be_used_ends_with_the_code_of_its_check(ran: list[list[str]]) -> None:
    with pytest.raises(typer.Exit) as ended:
        plugins.install.__wrapped__("fd-broken")
    assert ended.value.exit_code == PluginError.exit_code
