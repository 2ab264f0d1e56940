"""`fdcore simulate`: its output and files, and its errors for bad settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.engine.tracing.reader import read_trace
from fd_core.types import Phase

SMALL = ["poisson:rate=50,requests=20,prompt=50,output=8", "--profile", "h100:llama-8b"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_equal_arguments_write_equal_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file in files:
        run(*SMALL, "--workers", "2", "--json", str(file))
    first, second = (json.loads(file.read_text()) for file in files)
    first.pop("command", None), second.pop("command", None)
    assert first == second


def test_table_warns_that_the_profile_was_never_measured() -> None:
    assert "calculated, never measured" in run(*SMALL, "--slo", "ttft_p99=1")


def test_every_combination_runs_with_every_seed(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    vary = ["--vary", "scheduling_policy=fcfs,priority", "--vary", "max_num_seqs=2,4", "--vary", "load=1,2"]
    run(*SMALL, *vary, "--seeds", "2", "--json", str(written), "--page", str(tmp_path / "out.html"))
    assert written.read_text().count('"seed"') >= 16
    assert "<html" in (tmp_path / "out.html").read_text()


def test_policy_may_be_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from fd_core.scheduling.policies import SchedulingPolicy\n"
        "class Last(SchedulingPolicy):\n"
        "    def rank(self, request):\n"
        "        return (-request.arrival,)\n"
    )
    written = tmp_path / "out.json"
    run(*SMALL, "--vary", f"scheduling_policy=fcfs,{mine}:Last", "--json", str(written))
    assert "scheduling_policy=mine.py:Last" in written.read_text()


def test_production_trace_is_written_and_replayed(tmp_path: Path) -> None:
    written = tmp_path / "steps.jsonl"
    run(*SMALL, "--trace", str(written))
    contents = read_trace(written, 10_000)
    assert len(contents.occupancies) == 20
    assert not contents.problems
    assert "20 of 20" in run(f"trace:{written}", *SMALL[1:])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nonsense:rate=1"], 2, "nonsense"),
        ([*SMALL, "--vary", "colour=red"], 2, "colour"),
        ([*SMALL, "--vary", "max_num_seqs="], 2, "has no values"),
        ([*SMALL, "--vary", "load=1,2,1.0"], 2, "--vary load: the value '1.0' is repeated"),
        ([*SMALL, "--vary", "load=1", "--vary", "load=2"], 2, "list all values at once: --vary load=1,2"),
        ([*SMALL, "--max-num-seqs", "0"], 2, "max-num-seqs"),
        ([*SMALL, "--prefill", "1"], 2, "--decode"),
        ([*SMALL, "--workers", "3", "--routers", "0"], 2, "router"),
        ([*SMALL, "--scheduling-policy", "nobodys"], 4, "nobodys"),
        (["poisson:rate=1", "--profile", "h900:llama-8b"], 2, "h900"),
        ([*SMALL, "--slo", "speed=1"], 2, "speed"),
        ([*SMALL, "--seeds", "2", "--trace", "t.jsonl"], 2, "--seeds"),
    ],
)
def test_bad_arguments_are_one_line_errors(arguments: list[str], code: int, message: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == code, result.output
    assert message in result.output
    assert "Traceback" not in result.output


def test_trace_records_wait_reasons_of_every_request(tmp_path: Path) -> None:
    written = tmp_path / "steps.jsonl"
    run(*SMALL, "--max-num-seqs", "2", "--trace", str(written))
    lines = [position.line for position in read_trace(written, 10**6).positions]
    arrived = {entry.request_id: entry.at for line in lines for entry in line.arrived}
    ended = {entry.request_id: (line.ended, entry.phases) for line in lines for entry in line.finished}
    assert arrived.keys() == ended.keys() and len(ended) == 20
    for name, (at, phases) in ended.items():
        assert phases is not None and abs(sum(phases) - (at - arrived[name])) <= len(phases)
    assert any(phases[Phase.SLOT] for _, phases in ended.values() if phases)
    printed = CliRunner().invoke(app, ["trace", str(written)]).stdout
    assert "20 requests: mean time computing " in printed and "s, waiting for slot " in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--by", "speed"], "unknown figure 'speed'"),
        (["--by", "goodput"], "goodput requires an SLO"),
    ],
)
def test_invalid_comparison_fails_before_simulating(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fd_core.cli.planning.simulate._run_all", lambda *_: pytest.fail("a simulation was started"))
    result = CliRunner().invoke(app, ["simulate", *SMALL, *arguments])
    assert result.exit_code == 2 and words in " ".join(result.output.split())


POLICIES = """
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.router.policies import RouterPolicy


class Nothing(SchedulingPolicy):
    pass


class Wrong(SchedulingPolicy):
    def rank(self, request):
        return (request.prompt_len,)


class Beyond(RouterPolicy):
    def choose(self, context):
        return context.candidates[99]
"""


@pytest.mark.parametrize(
    ("flag", "named", "words"),
    [
        (
            "--scheduling-policy",
            "mine.py:Nothing",
            "mine.py:Nothing does not implement rank (implement rank as ",
        ),
        ("--scheduling-policy", "mine.py:Wrong", "mine.py, line 12, in Wrong.rank: AttributeError: 'QueuedRequest' ob"),
        ("--policy", "mine.py:Beyond", "mine.py, line 17, in Beyond.choose: IndexError: "),
        ("--scheduling-policy", "mine.py", "for a class in a file use"),
        (
            "--scheduling-policy",
            "wrong.py:Mine",
            "cannot be used: SyntaxError: '(' was never closed (wrong.py, line 1)",
        ),
    ],
)
def test_error_in_a_policy_file_is_one_line(flag: str, named: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(POLICIES)
    (tmp_path / "wrong.py").write_text("class Mine(")
    result = CliRunner().invoke(app, ["simulate", *SMALL, "--workers", "2", flag, str(tmp_path / named)])
    assert result.exit_code == 4
    assert words in result.output
    assert "of plugin" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert len(result.stderr.splitlines()[-1]) == len(result.stderr.strip().rpartition("fdcore:")[2]) + len("fdcore:")


@pytest.mark.parametrize("flag", ["--page", "--json"])
def test_unwritable_output_fails_before_simulating(flag: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "poisson:requests=1000000", flag, "/nowhere/out"])
    assert result.exit_code == 2
    assert "the folder /nowhere does not exist" in result.output
