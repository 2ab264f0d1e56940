"""Options of `fdcore conformance` on a small suite: cases, seeds, workers, soak and expected failures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fd_core.errors import ConfigError
from fd_core.testing.kit.expected import ExpectedFailure, read_expected_failures
from fd_core.testing.report.model import Card
from fd_core.testing.report.runs import Kit, RunOptions, run_suite
from tests.testing import small_suite
from tests.testing.documents import ROOT
from tests.testing.small_suite import SMALL

KIT = Kit("tests.testing.small_suite", "--fd-backend", ("small_suite",), find=lambda name: name)
pytestmark = pytest.mark.slow


def card(monkeypatch: pytest.MonkeyPatch, wrong: str = "", **options: object) -> Card:
    monkeypatch.setenv("FD_SMALL_WRONG", wrong)
    [found] = run_suite(["small"], RunOptions(**options), "", lambda *_: None, KIT).cards  # type: ignore[arg-type]
    return found


def listed(folder: Path, text: str) -> Path:
    (path := folder / "expected").write_text(text)
    return path


def test_named_cases_run_alone_and_their_values_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = card(monkeypatch, cases=("small:rows=65", "small:rows=7,wide=true"))
    assert [result.test for result in found.results] == [
        "test_case[small:rows=65]",
        "test_case[small:rows=7,wide=true]",
    ]
    assert found.held == {"small": {"rows": "7; 65", "wide": "false; true", "bits": "8"}}
    assert found.unseen == ["small_suite (6 of 8 tests)"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("large:rows=1", "no part of the kit has the case large:rows=1; parts: "),
        ("small:wide=maybe", "wide=maybe is not a value"),
    ],
)
def test_unknown_case_is_an_error_of_usage(monkeypatch: pytest.MonkeyPatch, case: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        card(monkeypatch, cases=("small:plain", case))


def test_failure_names_smallest_case_seed_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = card(monkeypatch, "case", seed=12)
    assert found.seeds == (12,)
    reasons = [result.reason for result in found.failures]
    command = "repeat: fdcore conformance small --case small:rows=65,wide=true"
    assert reasons
    assert all(f"row 64 is missing; {command}" in reason for reason in reasons)
    assert all("seed 12)" in reason for reason in reasons)
    assert found.held["small"]["rows"] == "1 to 65 (4 values)"


def test_workers_divide_tests_and_lone_tests_run_last(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, shared = (card(monkeypatch, workers=workers, quick=True) for workers in (1, 2))
    assert {result.test: result.outcome for result in shared.results} == {
        result.test: result.outcome for result in alone.results
    }
    assert shared.passed
    assert shared.results[-1].test == "test_alone"
    assert shared.held == alone.held
    assert shared.deselected == alone.deselected
    assert shared.deselected["small_suite"] > 0


def test_crash_of_a_worker_fails_its_test_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = card(monkeypatch, "crash", workers=2)
    assert [(result.test, result.reason) for result in found.failures] == [("test_shared[2]", "it ended the process")]
    assert {result.test for result in found.results} >= {"test_shared[3]", "test_alone"}
    assert not found.passed


def test_crash_without_workers_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = card(monkeypatch, "crash")
    assert found.error == "test_shared[2] ended the process with signal 9; later tests were not run"


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_interrupted_run_reports_what_was_tested(monkeypatch: pytest.MonkeyPatch, end: type[BaseException]) -> None:
    monkeypatch.setattr("fd_core.testing.report.runs.measured_names", lambda _: [small_suite.__file__])

    def progress(target: str, done: int, failed: int) -> None:
        if done == 2:
            raise end

    report = run_suite(["small", "other"], RunOptions(coverage=True), "", progress, KIT)
    [coverage], (first, second) = report.coverage, report.cards
    assert coverage.notes()[0].startswith(
        "coverage is incomplete, for small was not finished: interrupted; later tests "
    )
    assert len(first.results) == 2 and not first.passed and not second.passed
    assert first.error == second.error == "interrupted; later tests were not run"
    assert not second.results
    assert first.verdict == "interrupted"


def test_soak_runs_only_cases_of_a_fresh_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = card(monkeypatch, soak_seconds=0.2)
    assert {result.function for result in found.results} == {"test_case", "test_other_case"}
    assert found.seeds != (0,)


def test_soak_leaves_out_the_last_cases_of_a_file(tmp_path: Path) -> None:
    for number, part in enumerate(("SMALL", "OTHER")):
        source = f"import pytest\nfrom tests.testing.small_suite import {part}\n\n@pytest.mark.fd_cases({part})\n"
        (tmp_path / f"test_{number}.py").write_text(f"{source}def test_case(case):\n    case.check(False, '')\n")
    options = ["-q", "-c", os.devnull, "-p", "no:cacheprovider", "--fd-soak=1e-6"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout


def test_soak_goes_on_with_other_seeds_until_time_is_over() -> None:
    rounds = RunOptions(soak_seconds=60.0, seed=7).processes()
    assert [next(rounds)[0] for _ in range(3)] == ["--fd-seed=7", "--fd-seed=8", "--fd-seed=9"]
    assert not list(RunOptions(soak_seconds=0.0).processes())
    assert len({next(RunOptions(soak_seconds=60.0).processes())[0] for _ in range(9)}) > 1


def test_expected_failures_do_not_fail_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = "# known\n\ntest_shared[1]  # 1 is odd\nsmall:rows=65,wide=true  # the last row\nsmall:rows=64  # nothing\n"
    path = listed(tmp_path, lines + "test_alone  # a line of a test that -k excludes\n")
    found = card(monkeypatch, "case shared", expected_failures=path, expression="not alone")
    expected = {result.test: result for result in found.results if result.outcome == "expected"}
    assert expected["test_shared[1]"].expected == "test_shared[1]  # 1 is odd"
    assert "1 is wrong" in expected["test_shared[1]"].reason
    assert len(expected) > 1
    assert found.passed
    assert found.unneeded == ["small:rows=64  # nothing"]


def test_expected_failure_that_matches_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = listed(tmp_path, "test_shared*  # odd\ntest_gone  # gone\n")
    with pytest.raises(ConfigError, match="the expected failure 'test_gone' matches no test"):
        card(monkeypatch, expected_failures=path, workers=2)


@pytest.mark.parametrize("line", ["test_shared", "test_shared #", "test_shared#odd", "small:rows=1  #  "])
def test_expected_failure_without_a_reason_is_an_error(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2, .* has no reason"):
        read_expected_failures(listed(tmp_path, f"a  # b\n{line}\n"))


def test_unreadable_expected_failures_are_an_error_of_usage(tmp_path: Path) -> None:
    missing, other = tmp_path / "none", tmp_path / "other"
    other.write_bytes(b"\xff")
    for path, reason in ((missing, f"cannot read {missing}: no such file"), (other, f"{other} is not UTF-8 text")):
        with pytest.raises(ConfigError, match=f"^{re.escape(reason)}"):
            read_expected_failures(path)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("test_a", True),
        ("kv:test_a", True),
        ("test_a[x]", True),
        ("kv:test_a[x]", True),
        ("*[x]", True),
        ("kv:*", True),
        ("test", False),
        ("budget:test_a", False),
        ("test_a[y]", False),
        ("test_a[?]", False),
    ],
)
def test_patterns_match_names_with_stars_only(pattern: str, matches: bool) -> None:
    assert ExpectedFailure(pattern, "why").matches("kv", "test_a[x]", None) == matches


def test_pattern_of_a_case_matches_its_values() -> None:
    case = SMALL.case("rows=65,bits=4")
    matching = ("small:rows=65", "small:bits=4,rows=65", "small:wide=false")
    assert all(ExpectedFailure(pattern, "why").matches("x", "test_case", case) for pattern in matching)
    for pattern in ("small:plain", "small:rows=64", "small:rows=65,wide=true"):
        assert not ExpectedFailure(pattern, "why").matches("x", "test_case", case)


def test_terminated_run_leaves_no_process_behind(tmp_path: Path) -> None:
    events, seen = tmp_path / "events", tmp_path / "pid"
    child = f"import os, time; open({str(seen)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(60)"
    run = (
        "import os, sys; from pathlib import Path; from fd_core.testing.kit.processes import follow\n"
        f"for _ in follow([sys.executable, '-c', {child!r}], Path({str(events)!r}), object, 60.0,"
        f" output=Path({str(tmp_path / 'output')!r}), stdin=0, env=os.environ): pass"
    )
    process = subprocess.Popen([sys.executable, "-c", run], env=os.environ | {"PYTHONPATH": str(ROOT)})
    while not seen.exists() or not seen.read_text().endswith(" "):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    assert process.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(seen.read_text()), 0)
