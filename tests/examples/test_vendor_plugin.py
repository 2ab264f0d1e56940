"""The plugin outside the repository is found by its entry point, and passes the kit and its own tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES
from tests.plugin_sites import installed
from tests.testing.documents import passed, run_line


@pytest.mark.parametrize(
    ("chosen", "fewest"),
    [("not fd_thorough and not fd_pairs and not fd_alone", 8), pytest.param("", 11, marks=pytest.mark.soak)],
    ids=["brief", "whole"],
)
def test_the_plugin_passes_its_tests_where_it_is_installed(chosen: str, fewest: int, tmp_path: Path) -> None:
    """The days and pairs of the kit, and its tests of time, run for the built-in policies by default."""
    project = tmp_path / "slowstart"
    shutil.copytree(EXAMPLES / "vendor-plugin", project, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    installed(project)
    assert passed(run_line(project, f"pytest -p no:cacheprovider -m '{chosen}'")) >= fewest
