"""`fdcore plan`: its result, and its errors for questions without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fd_core.cli.app import app

LOAD = "constant:rate=60,requests=30,prompt=2000,output=2"
SMALL = [LOAD, "--profile", "h100:llama-8b", "--roles", "mixed", "--seeds", "2", "--first", "20"]
SLO = ["--slo", "ttft_p99=0.2,tpot_p99=0.2"]


def planned(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "160"})


def test_plan_holds_and_one_worker_fewer_does_not(tmp_path: Path) -> None:
    written, page = tmp_path / "plan.json", tmp_path / "plan.html"
    result = planned(*SMALL, *SLO, "--jobs", "1", "--json", str(written), "--page", str(page))
    assert result.exit_code == 0, result.output
    assert "CALCULATED, NEVER MEASURED" in result.stdout
    assert "What limits is " in result.stdout
    answer = json.loads(written.read_text())
    best, below = answer["best"], answer["below"]
    assert best["checked"]
    assert best["margin"] >= 0
    assert below["units"] == best["units"] - 1
    assert below["margin"] < 0
    assert answer["holds_load"] < answer["breaks_load"]
    assert answer["limit"]["what"] == "compute of prefill"
    assert answer["unfinished"] == ""
    assert "What limits is " in page.read_text()


def test_number_of_jobs_does_not_change_the_plan(tmp_path: Path) -> None:
    answers = []
    for count in ("1", "2"):
        written = tmp_path / f"{count}.json"
        brief = ["constant:rate=20,requests=6,prompt=500,output=2", "--profile", "h100:llama-8b", "--roles", "mixed"]
        assert planned(*brief, *SLO, "--seeds", "2", "--jobs", count, "--json", str(written)).exit_code == 0
        answers.append(json.loads(written.read_text()))
        answers[-1]["asked"].pop("command")
    assert answers[0] == answers[1]


def test_output_of_a_policy_does_not_corrupt_results(tmp_path: Path) -> None:
    policy = tmp_path / "loud.py"
    policy.write_text(
        "from fd_core.scheduling.policies import SchedulingPolicy\n\n\n"
        "class Loud(SchedulingPolicy):\n    def rank(self, request):\n        print('here')\n        return (0,)\n"
    )
    brief = ["constant:rate=20,requests=6,prompt=500,output=2", "--profile", "h100:llama-8b", "--roles", "mixed"]
    result = planned(*brief, *SLO, "--jobs", "2", "--scheduling-policy", f"{policy}:Loud")
    assert result.exit_code == 0, result.output


def test_load_above_the_rate_limit_is_not_tried() -> None:
    brief = ["constant:rate=400000,requests=6,prompt=5,output=2", "--profile", "h100:llama-8b", "--roles", "mixed"]
    result = planned(*brief, *SLO, "--jobs", "1", "--seeds", "1")
    assert result.exit_code == 0, result.output
    assert "up to at least 2 times the load" in result.stdout
    assert "What would limit first is" in " ".join(result.stdout.split())


def test_best_plan_so_far_is_shown_when_runs_are_exhausted() -> None:
    result = planned(*SMALL, *SLO, "--jobs", "1", "--max-runs", "7")
    assert "NOT COMPLETE" in result.stdout
    assert "--max-runs" in result.stdout


def test_closest_plan_is_shown_when_none_holds() -> None:
    load = "constant:rate=400,requests=30,prompt=4000,output=2"
    result = planned(load, "--profile", "h100:llama-8b", "--roles", "mixed", *SLO, "--jobs", "1", "--max-devices", "2")
    assert result.exit_code in (1, 2)
    assert "None of the tried plans" in result.stdout or "are needed" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["poisson:rate=1", "--profile", "h100:llama-8b", "--slo", "tpot_p99=0.001"],
            2,
            "s, with h100:llama-8b",
        ),
        ([LOAD, *SLO], 2, "no profile was specified"),
        ([LOAD, *SLO, "--devices", "h100"], 2, "must be used together"),
        ([LOAD, *SLO, "--devices", "h100", "--model", "llama-70b", "--tp", "1"], 2, "leave no memory"),
        ([LOAD, *SLO, "--devices", "h900", "--model", "llama-70b"], 2, "h900"),
        ([*SMALL, *SLO, "--trace", "x.bin"], 2, "exclude each other"),
        (["--trace", "nowhere.bin", "--profile", "h100:llama-8b", *SLO], 2, "nowhere.bin"),
        ([*SMALL, *SLO, "--roles", "1:x"], 2, "1:x"),
        ([*SMALL, *SLO, "--max-num-seqs", "0"], 2, "--max-num-seqs"),
        ([*SMALL, *SLO, "--profile", "a100:llama-8b"], 2, "--price"),
        ([*SMALL, *SLO, "--price", "free"], 2, "--price"),
        ([*SMALL, *SLO, "--time-limit", "inf"], 2, "--time-limit"),
        ([*SMALL, *SLO, "--page", "/nowhere/x.html"], 2, "--page"),
        ([*SMALL, *SLO, "--json", "/nowhere/x.json"], 2, "--json"),
        (["poisson:duration=0", *SMALL[1:], *SLO], 2, "contains no requests"),
        (["poisson:prompt=200000,longest=200000", *SMALL[1:], "--slo", "tpot_p99=1"], 2, "1,000 of 1,000 prompts have"),
        (["poisson:prompt=9000", *SMALL[1:], "--slo", "ttft_p99=9", "--num-kv-blocks", "100"], 2, "--max-model-len"),
        (["constant:rate=2000,requests=3000,prompt=4000", *SMALL[1:], *SLO, "--max-devices", "2"], 2, "are needed"),
        ([*SMALL, *SLO, "--scheduling-policy", "nobodys", "--jobs", "1"], 4, "nobodys"),
    ],
)
def test_bad_arguments_are_one_line_errors(arguments: list[str], code: int, message: str) -> None:
    result = planned(*arguments)
    assert result.exit_code == code, result.output
    assert message in result.output
    assert "Traceback" not in result.output
