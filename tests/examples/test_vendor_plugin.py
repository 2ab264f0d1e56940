"""The plugin outside the repository is found by its entry point, and passes the kit and its own tests."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.examples.conftest import EXAMPLES
from tests.plugin_sites import installed
from tests.testing.documents import passed, run_line


def test_the_plugin_passes_its_tests_where_it_is_installed(tmp_path: Path) -> None:
    project = tmp_path / "slowstart"
    shutil.copytree(EXAMPLES / "vendor-plugin", project, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    installed(project)
    assert passed(run_line(project, "pytest -p no:cacheprovider")) >= 11
