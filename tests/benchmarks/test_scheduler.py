import json
from pathlib import Path

import pytest
import scheduler
from scheduler import OURS, THEIRS, Case

from fd_core.cli.bench.scheduler import StepTimes


def test_flags_become_lists_and_folders():
    options = scheduler.parse(["--running", "16,64", "--drafts=0", "--env", "vllm=/some/where"])
    assert (options.running, options.drafts, options.env) == ([16, 64], [0], Path("/some/where"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--running", "16,few"], "--running expects whole numbers"),
        (["--running", "0"], "--running must be at least 1"),
        (["--drafts", "-1"], "--drafts must be at least 0"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--block-size", "0"], "--block-size must be at least 1"),
        (["--env", "ov=/x"], "--env expects vllm=DIR"),
        (["--env", "vllm"], "--env expects vllm=DIR"),
    ],
)
def test_wrong_flags_are_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        scheduler.parse(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def finished_case():
    case = Case(10, 0)
    for slow in (1, 5, 1):
        # One round on a machine that is five times slower: the ratio inside it is the same.
        case.rounds[OURS].append(StepTimes((slow * 1e-5,), (slow * 1e-5,)))
        case.rounds[THEIRS].append(StepTimes((slow * 4e-5,), (slow * 2e-5,)))
    return case


def test_ratios_are_taken_inside_rounds():
    case = finished_case()
    assert case.ratio("plan_s") == pytest.approx(4)
    assert case.ratio("commit_s") == pytest.approx(2)
    assert case.ratio("step_s") == pytest.approx(3)


def test_results_hold_every_step_and_one_table_row_for_each_scheduler(tmp_path):
    facts = {
        "command": "python benchmarks/scheduler.py",
        "machine": {"cpu": "abacus"},
        "load_average_before": 0.0,
        "versions": {"fd_core": "1"},
        "rounds": 3,
        "steps": 1,
        "block_size": 32,
    }
    as_json, as_markdown = scheduler.write([finished_case()], facts, tmp_path / "speed")
    (case,) = json.loads(as_json.read_text())["cases"]
    assert case["rounds_us"][THEIRS][1] == {"plan": [200.0], "commit": [100.0]}
    assert case[OURS]["us"]["step"]["median"] == pytest.approx(20)
    rows = [line for line in as_markdown.read_text().splitlines() if line.startswith("| 10 |")]
    assert [row.split(" | ")[2] for row in rows] == [OURS, THEIRS]
