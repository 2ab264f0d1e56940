"""Schedulers and policies from files that stand in no package."""

from __future__ import annotations

from pathlib import Path

import pytest

from fd_core.errors import PluginError
from fd_core.plugins import CONNECTOR, ROUTER_POLICY, SCHEDULING_POLICY, installed_plugins

MINE = """
from fd_core.scheduling.policies import SchedulingPolicy

class Longest(SchedulingPolicy):
    def rank(self, request):
        return (-request.arrival,)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_class_in_a_file_is_loaded_once(mine: Path) -> None:
    first, second = (installed_plugins().load(SCHEDULING_POLICY, f"{mine}:Longest") for _ in range(2))
    assert first is second
    assert first.__name__ == "Longest"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{file}:Shortest", "Shortest"),
        ("{file}x.py:Longest", "does not exist"),
    ],
)
def test_what_is_not_there_is_named(mine: Path, text: str, told: str) -> None:
    with pytest.raises(PluginError, match=told):
        installed_plugins().load(SCHEDULING_POLICY, text.format(file=mine))


def test_a_class_of_another_kind_is_refused(mine: Path) -> None:
    with pytest.raises(PluginError, match="is not a subclass of fd_core"):
        installed_plugins().load(ROUTER_POLICY, f"{mine}:Longest")


def test_a_file_that_raises_is_told_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        installed_plugins().load(SCHEDULING_POLICY, f"{tmp_path / 'bad.py'}:Any")


def test_what_other_processes_may_name_is_never_a_file(mine: Path) -> None:
    with pytest.raises(PluginError, match="unknown connector"):
        installed_plugins().load(CONNECTOR, f"{mine}:Longest")
