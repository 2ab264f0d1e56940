"""Schedulers and policies from files outside of packages."""

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


def test_class_in_a_file_is_loaded_once(mine: Path) -> None:
    first, second = (installed_plugins().load(SCHEDULING_POLICY, f"{mine}:Longest") for _ in range(2))
    assert first is second
    assert first.__name__ == "Longest"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{file}:Shortest", "Shortest"),
        ("{file}x.py:Longest", "does not exist"),
    ],
)
def test_missing_class_or_file_is_named(mine: Path, text: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        installed_plugins().load(SCHEDULING_POLICY, text.format(file=mine))


def test_class_of_another_kind_is_rejected(mine: Path) -> None:
    with pytest.raises(PluginError, match="is not a subclass of fd_core"):
        installed_plugins().load(ROUTER_POLICY, f"{mine}:Longest")


def test_error_in_a_file_is_reported_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        installed_plugins().load(SCHEDULING_POLICY, f"{tmp_path / 'bad.py'}:Any")


def test_connectors_cannot_be_loaded_from_files(mine: Path) -> None:
    with pytest.raises(PluginError, match="unknown connector"):
        installed_plugins().load(CONNECTOR, f"{mine}:Longest")
