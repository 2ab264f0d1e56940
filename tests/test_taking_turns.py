"""The default run has each kind of cases, each value of a matrix, and each row of a table, and leaves no files."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytest_plugins = ("pytester",)

SOURCE = """
import pytest

@pytest.mark.in_turn(2, by=lambda number: number // 10)
@pytest.mark.parametrize("number", [1, 2, 3, 11, pytest.param(21, marks=pytest.mark.soak), 22])
def test_kinds(number): pass

@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("name, size", [("a", 1), ("a", 2), ("b", 1)])
def test_matrix(name, size, number): pass

@pytest.mark.parametrize("name, size", [(name, size) for name in "abcd" for size in range(5)])
def test_table(name, size): pass

@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("name", "ab")
def test_few(name, number): pass

@pytest.mark.in_turn(9)
@pytest.mark.parametrize("number", range(3))
def test_rare(number): pass
"""


def test_default_run_has_each_kind_value_and_row(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.conftest.SHARE", 3)
    pytester.makeini("[pytest]\nmarkers =\n  soak\n  in_turn(count)")
    pytester.makepyfile(SOURCE)
    items, _ = pytester.inline_genitems("-p", "tests.conftest")
    cases = [item.name.rstrip("]").partition("[") for item in items if not item.get_closest_marker("soak")]
    chosen = {test: [case for name, _, case in cases if name == test] for test, _, _ in cases}
    assert chosen["test_kinds"] == ["1", "3", "11", "22"]
    assert len(chosen["test_matrix"]) < 12
    assert {case.rpartition("-")[0] for case in chosen["test_matrix"]} == {"a-1", "a-2", "b-1"}
    assert {case.rpartition("-")[2] for case in chosen["test_matrix"]} == {f"{number}" for number in range(9)}
    assert [len(chosen[test]) for test in ("test_table", "test_few", "test_rare")] == [20, 4, 1]


KILLED = """
import subprocess, sys, tempfile
from pathlib import Path

def test_process_that_is_killed_leaves_a_folder():
    code = "import os, signal, tempfile; tempfile.mkdtemp(); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code])
    assert len(list(Path(tempfile.gettempdir()).iterdir())) == 1
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one process", "workers"])
def test_temporary_files_end_with_the_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("temporary")))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]")
    file = pytester.makepyfile(KILLED)
    pytester.runpytest_subprocess("-p", "tests.conftest", *workers, file).assert_outcomes(passed=1)
    assert not list((pytester.path / "temporary").glob("fd*"))
