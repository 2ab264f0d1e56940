"""`fdcore install`: its output after pip has finished."""

import subprocess

import pytest
import typer

from fd_core.cli.plugins import plugins
from fd_core.errors import PluginError


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the list of executed commands; pip and the check exit with the codes of `CODES`."""
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
def test_only_the_installed_plugin_is_checked(ran: list[list[str]], name: str, distribution: str) -> None:
    plugins.install.__wrapped__(name)
    assert len(ran) == 2 and ran[1][-3:] == ["plugins", "check", distribution]


def test_unknown_name_lists_the_plugins_of_the_project(ran: list[list[str]]) -> None:
    with pytest.raises(PluginError, match=r"could not install nosuch; .* \(the plugins of fd_core are gpu_cuda, "):
        plugins.install.__wrapped__("nosuch")
    assert len(ran) == 1


def test_unusable_plugin_exits_with_the_code_of_its_check(ran: list[list[str]]) -> None:
    with pytest.raises(typer.Exit) as ended:
        plugins.install.__wrapped__("fd-broken")
    assert ended.value.exit_code == PluginError.exit_code
