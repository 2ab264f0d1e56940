import json

import pytest
import simulate


def test_run_reports_its_cost(tmp_path):
    row = simulate.simulate("short", 2, 40, 0)
    assert (row.requests, row.workers) == (40, 2)
    assert row.steps > 40 and row.events > row.steps
    facts = {"command": "c", "machine": {"cpu": "C"}, "load_average_before": 0.1, "profile": "p", "seed": 0}
    out = tmp_path / "s.v2"
    assert simulate.write([row], facts, out) == tmp_path / "s.v2.md"
    assert json.loads((tmp_path / "s.v2.json").read_text())["rows"][0]["steps"] == row.steps
    assert f"| short | 2 | 40 | {row.steps} |" in (tmp_path / "s.v2.md").read_text()


def test_load_grows_with_the_workers():
    one, ten = (list(simulate.conversations(simulate.LOADS["code"], 500, workers, 0)) for workers in (1, 10))
    assert one[-1].at == pytest.approx(10 * ten[-1].at)
    assert [each.turns for each in one] == [each.turns for each in ten]


@pytest.mark.parametrize("wrong", [["--workers", "a"], ["--workers", "0"], ["--requests", "0"]])
def test_wrong_numbers_are_rejected(wrong, capsys):
    with pytest.raises(SystemExit):
        simulate.parse(wrong)
    assert "--workers" in capsys.readouterr().err
