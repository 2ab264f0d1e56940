import json

import saving

from fd_core.cli.bench.compare.stats import PeerRun, RequestResult, summarise


def run(name, number, wall):
    return PeerRun(name, "w2", number, wall, (RequestResult((1, 2, 3), 0.1, wall),), {"preemptions": 0})


def test_contenders_differ_only_in_saved_kv(tmp_path):
    assert saving.settings("off", tmp_path) == {"save_preempted_kv": False}
    assert saving.settings("host", tmp_path) == saving.HOST
    disk = saving.settings("disk", tmp_path)
    assert disk.items() > saving.HOST.items()
    assert disk["kv_store"].startswith("disk:")
    assert (tmp_path / "secret").stat().st_mode & 0o77 == 0


def test_cost_is_a_ratio_inside_rounds(tmp_path):
    runs = [run("off", 1, 1.0), run("disk", 1, 1.25), run("off", 2, 10.0), run("disk", 2, 12.5)]
    table = summarise(runs, reference=saving.OFF)
    facts = {
        "command": "python benchmarks/saving.py",
        "machine": {"cpu": "C", "cores": 2},
        "load_average": [0.1],
        "preemptions": 0,
        "threads": 2,
        "rounds": 2,
    }
    as_json, as_markdown = saving.write(table, [], facts, tmp_path / "s")
    assert [row["ratio"] for row in json.loads(as_json.read_text())["rows"]] == [1, 0.8]
    assert "| w2 | disk |" in as_markdown.read_text()
