import json

import pytest
import return_ttft
from return_ttft import DISK, Return


def one(number, computed, loaded, decision=True, tokens=512, way=DISK, lost=0):
    return Return(way, tokens, number, computed, loaded, 480, lost, True, 0.2, 0.01, decision)


def test_times_and_decisions_are_compared_inside_rounds():
    returns = [one(1, 1.0, 0.5), one(2, 10.0, 1.0, lost=32), one(3, 0.1, 0.4), one(1, 8.0, 1.0, None, 8000)]
    short, long = return_ttft.rows(returns, 1000)
    assert (short.tokens, short.computed_s, short.loaded_s, short.times) == (512, 1.0, 0.5, 2.0)
    assert (short.decision, short.right, short.lost_tokens) == ("load 3 of 3", "2 of 3", 32)
    assert short.bytes_per_s == 480 / 32 * 1000 / 0.5
    assert (long.decision, long.right) == ("", "")
    assert "480 (32 lost in all)" in short.cells()


def test_files_hold_every_return_and_the_command(tmp_path):
    returns = [one(1, 1.0, 0.5)]
    facts = {
        "command": "python benchmarks/return_ttft.py",
        "machine": {"cpu": "C", "cores": 2},
        "load_average": [0.1, 0.2],
        "read_bandwidth": 4e10,
        "block_bytes": 737280,
        "fd_core": "1",
        "threads": 2,
        "rounds": 1,
    }
    as_json, as_markdown = return_ttft.write(return_ttft.rows(returns, 737280), returns, facts, tmp_path / "r")
    values = json.loads(as_json.read_text())
    assert values["returns"][0]["loaded_s"] == 0.5
    text = as_markdown.read_text()
    assert "    python benchmarks/return_ttft.py\n" in text
    assert "| 512 | disk | 1.000 | 0.500 | 2.0 |" in text
    assert "720 KiB" in text
    assert "1 of 1. fd_core 1." in text


def test_no_two_prompts_share_a_block():
    prompts = [return_ttft._prompt(range(1000), 100, str(number)) for number in range(20)]
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 20


@pytest.mark.parametrize(
    "arguments", [["--tokens", "8192"], ["--tokens", "32"], ["--tokens", "x"], ["--ways", "tape"], ["--rounds", "0"]]
)
def test_invalid_arguments_are_rejected(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        return_ttft.parse(arguments)
    assert arguments[0] in capsys.readouterr().err
