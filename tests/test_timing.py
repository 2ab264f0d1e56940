"""Tests of elapsed time are marked, so that none runs while other tests use the CPUs."""

from pathlib import Path

import pytest

from tests.timing import unmarked

ROOT = Path(__file__).parents[1]


def test_tests_of_elapsed_time_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert unmarked(sorted(Path("tests").rglob("*.py"))) == []


@pytest.mark.parametrize(
    "body",
    [
        "assert time.monotonic() - began < 5",
        "took = time.perf_counter() - began\n    assert took < 5",
        "assert slowest() < 5",
        "now = time.monotonic()\n    longest = max(0, now - began)\n    assert longest < 5",
        "used = resource.getrusage(0).ru_utime - began\n    assert used < 5",
        "times = []\n    times.append(time.monotonic() - began)\n    assert max(times) < 5",
    ],
)
def test_unmarked_test_of_elapsed_time_is_found(tmp_path: Path, body: str) -> None:
    helper = "def slowest():\n    began = time.time()\n    return time.time() - began\n"
    (tmp_path / "test_it.py").write_text(f"{helper}def test_it():\n    began = time.monotonic()\n    {body}\n")
    assert [found.split()[-1] for found in unmarked([tmp_path / "test_it.py"])] == ["test_it"]


def test_marked_tests_and_wait_loops_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "@pytest.mark.timing\ndef test_marked():\n    assert time.monotonic() - began < 5\n"
        "def test_waits():\n    deadline = time.monotonic() + 5\n    assert time.monotonic() < deadline\n"
    )
    assert unmarked([tmp_path / "test_it.py"]) == []
