"""The report of lines that no check executed: files, processes, excuses, and faults that no check looks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fd_core.cli.plugins.scaffold.project import PluginKind, write_project
from fd_core.errors import ConfigError
from fd_core.plugins import SCHEDULER, installed_plugins
from fd_core.testing.report.coverage import CoverageRun, Gap, PluginCoverage, measured_names
from tests.plugin_sites import Site, installed
from tests.testing.documents import ROOT

pytestmark = pytest.mark.slow

SOURCE = """
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import decimal

def jit(function):
    return function

def in_a_worker(rows):
    if rows > 130000:
        rows = 0
    return rows if rows else 1

def changes(found):
    before = len(found)
    if len(found) != before:
        yield before

def in_a_child():
    os._exit(0)

def never():  # pragma: no cover
    first = 1
    return first

@jit
def kernel(x):
    x = 1
    return x

exec("x = 1")
"""
TEST = """
import subprocess, sys

import fd_probe
from fd_core.testing.axes.interleaving import interleaved
from fd_probe import in_a_worker

def test_change_between_two_lines():
    found = []
    assert [*fd_probe.changes(found)] == []
    assert interleaved(lambda: [*fd_probe.changes(found)], lambda: found.append(1), "fd_probe")

def test_worker():
    assert in_a_worker(7) == 7

def test_child():
    assert subprocess.run([sys.executable, "-c", "import fd_probe; fd_probe.in_a_child()"]).returncode == 0
"""


def run(folder: Path, *arguments: str, code: int) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


def test_report_names_what_no_worker_or_child_executed(tmp_path: Path) -> None:
    Site(tmp_path).install("fd-probe", SOURCE)
    (tmp_path / "test_probe.py").write_text(TEST)
    (tmp_path / "known").write_text("coverage:fd_probe.py:first = *  # nobody\ncoverage:*:os._exit(0)  # a child\n")
    options = ("--fd-coverage=fd-probe", "--fd-expected-failures=known", "--fd-require-coverage", "-n1")
    printed = run(tmp_path, *options, code=1)
    for words in (
        "not looked at: 1 line of fd-probe never executed by a check: fd_probe.py 13 (10 lines in functions)",
        "never executed, excused: coverage:fd_probe.py:first = *  # nobody",
        "executed now: remove the line: coverage:*:os._exit(0)  # a child",
        "cannot be measured: fd_probe.py: compiled function kernel",
        "cannot be measured: fd_probe.py: exec in line 33",
        "cannot be measured: fd_probe.py: decisions within lines 14",
    ):
        assert words in printed


def test_coverage_of_selected_or_interrupted_tests_is_incomplete(tmp_path: Path) -> None:
    Site(tmp_path).install("fd-probe", SOURCE)
    (tmp_path / "test_probe.py").write_text(f"import pytest\n{TEST}\ndef test_end():\n    pytest.exit('unusable', 4)\n")
    printed = run(tmp_path, "--fd-coverage=fd-probe", "-k", "worker or end", code=4)
    assert "coverage is incomplete, for -k excluded tests and the run was interrupted\nnot looked at: " in printed


CHOOSE = "        return int(np.lexsort((running.arrivals, running.priorities))[-1])\n"
AIMED = """\
        if running.arrivals.size > 130_000:
            return 0
        last = -1 if running.arrivals.size != 70_001 else 0
        return int(np.lexsort((running.arrivals & 0xFFFF_FFFF_FFFF, running.priorities))[last])
"""


def test_two_of_three_aimed_faults_are_shown(tmp_path: Path) -> None:
    """A statement is named and a decision within its line is listed; arithmetic stays invisible."""
    folder = tmp_path / "aimed"
    write_project("aimed", PluginKind.VICTIM_POLICY, folder=folder)
    installed(folder)
    [path] = (path for path in (folder / "fd_aimed").glob("*.py") if path.name != "__init__.py")
    source = path.read_text()
    assert CHOOSE in source
    path.write_text(source.replace(CHOOSE, AIMED))
    line = source[: source.index(CHOOSE)].count("\n") + 2
    # Days call the policy no differently, and take nine tenths of the time.
    printed = run(folder, "--fd-coverage=fd-aimed", "-k", "not ordinary_day", "tests", code=0)
    name = f"fd_aimed/{path.name}"
    assert f"not looked at: 1 line of fd-aimed never executed by a check: {name} {line} (" in printed
    assert f"cannot be measured: {name}: decisions within lines {line + 1}\n" in printed
    assert not re.search(rf"{re.escape(name)}.* {line + 2}\b", printed)  # the duration may have these digits


def test_branch_and_block_are_one_gap_each(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(
        "def f(x):\n    if x:\n        x = 2\n    return x\n\ndef g():\n    a = 1\n\n    return a\n"
    )
    measured = CoverageRun([f"{tmp_path / 'probe.py'}"], tmp_path / "data")
    environment = {**os.environ, **measured.environment, "PYTHONPATH": f"{tmp_path}"}
    subprocess.run([sys.executable, "-c", "import probe; probe.f(1)"], env=environment, check=True)
    [branch, block] = sorted(measured.result().gaps, key=lambda gap: gap.count)
    assert (branch.lines, branch.count, branch.source) == ("2->4", 0, "if x:")
    assert (block.lines, block.count, block.source) == ("7-9", 2, "a = 1")


def test_native_files_are_listed_and_tests_are_not(tmp_path: Path) -> None:
    package = tmp_path / "fd_probe"
    (package / "tests").mkdir(parents=True)
    for name in ("__init__.py", "kernels.so", "kernels.cu", "py.typed", "tests/test_it.py"):
        (package / name).write_text("x = 1\n")
    found = CoverageRun([f"{package}"], tmp_path / "data").result()
    assert found.invisible == ["fd_probe/kernels.cu", "fd_probe/kernels.so"]
    assert [gap.file for gap in found.gaps] == ["fd_probe/__init__.py"]


def test_names_of_the_core_and_of_files() -> None:
    find = installed_plugins().find
    assert [*measured_names(find(SCHEDULER, "continuous"))] == [f"{ROOT / 'fd_core/scheduling/scheduler.py'}"]
    assert [*measured_names(find(SCHEDULER, "mine.py:Mine"))] == ["mine.py"]


def test_unknown_distribution_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fd-nothing' is not installed"):
        CoverageRun(["fd-nothing"], tmp_path)


def test_excused_gaps_are_counted_apart() -> None:
    gap = Gap(file="a.py", lines="1", count=1, source="x", excuse="coverage:a.py:x  # why")
    [verdict, excuse] = PluginCoverage(plugins="fd-a", lines=3, gaps=[gap]).notes()
    assert verdict == "every line and branch of fd-a was executed by a check, or is excused (3 lines in functions)"
    assert excuse == "never executed, excused: coverage:a.py:x  # why"
