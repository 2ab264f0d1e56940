import json
from dataclasses import replace
from pathlib import Path

import gpu_roofline
import pytest
from harness.roofline import CHIPS, FORMATS, Launching, Step, floor_of, held_bytes, kv_token_bytes, work_of

from fd_core.simulation.costs.calculating import ARCHITECTURES

LLAMA, QWEN = ARCHITECTURES["llama-8b"], ARCHITECTURES["qwen3-30b-a3b"]
FREE = replace(CHIPS["h100"], launching=Launching(0.0, 0.0, 0.0))
LAYERS_8B = 32 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 14336)


def test_decode_moves_weights_kv_and_logits_once():
    work = work_of(LLAMA, FORMATS["bf16"], Step(1, 1, 1024))
    # The head, and one row of the embedding; 32 layers of 8 heads of 128 keys and values.
    assert work.weights == 2 * LAYERS_8B + 2 * (128256 + 1) * 4096
    assert work.kv == 1024 * 2 * 32 * 8 * 128 * 2
    assert work.logits == 2 * 4 * 128256
    assert work.products == 2 * LAYERS_8B
    assert work.wide_products == 2 * 128256 * 4096 + 1024 * 32 * 4 * 32 * 128
    assert work.launches == 32 * 9 + 8


def test_8b_on_an_h100_by_hand():
    """15.14 GB at 3.35 TB/s are 4.52 ms; a graph of 296 kernels adds 15 + 296 us."""
    step = Step(1, 1, 1024)
    floor = floor_of(work_of(LLAMA, FORMATS["bf16"], step), step, FORMATS["bf16"], CHIPS["h100"])
    assert floor.seconds == pytest.approx(4.8318e-3, rel=1e-4)
    assert (floor.binds, round(floor.rate)) == ("memory", 207)


def test_rows_share_the_weights_and_not_the_kv():
    one, many = (work_of(LLAMA, FORMATS["fp8"], Step(rows, 1, 1024)) for rows in (1, 256))
    assert many.weights == pytest.approx(one.weights, rel=1e-3)
    assert many.kv == 256 * one.kv
    assert many.products == 256 * one.products


def test_prefill_sees_each_earlier_token_once():
    step = Step(1, 2048, 2048)
    assert step.pairs == 2048 * 2049 / 2
    work = work_of(LLAMA, FORMATS["bf16"], step)
    assert work.kv == 2048 * kv_token_bytes(LLAMA)  # written; nothing was there to read
    assert work.products == 2048 * 2 * LAYERS_8B
    assert floor_of(work, step, FORMATS["bf16"], FREE).binds == "compute"
    bf16, fp8 = (floor_of(work, step, FORMATS[how], FREE).seconds for how in ("bf16", "fp8"))
    assert 1.8 < bf16 / fp8 < 2


def test_prefill_chunk_reads_kv_of_earlier_chunks():
    assert work_of(LLAMA, FORMATS["bf16"], Step(1, 512, 2048)).kv == 2048 * kv_token_bytes(LLAMA)


@pytest.mark.parametrize(("rows", "hit"), [(1, 8), (32, 128 * (1 - (15 / 16) ** 32)), (4096, 128)])
def test_only_experts_that_are_hit_are_read(rows, hit):
    assert QWEN.experts_hit(rows) == pytest.approx(hit)
    attention, expert = 2048 * 128 * 2 * 36, 3 * 2048 * 768
    layers = 48 * (2 * (attention + hit * expert) + 4 * 2048 * 128)
    work = work_of(QWEN, FORMATS["bf16"], Step(rows, 1, 1))
    assert work.weights == pytest.approx(layers + 2 * (151936 + rows) * 2048)
    assert work.products == 2 * rows * 48 * (attention + 8 * expert)
    assert work.launches == 48 * 12 + 8


def test_weights_of_four_bits_are_multiplied_as_bf16():
    step = Step(1, 2048, 2048)
    work = work_of(LLAMA, FORMATS["int4"], step)
    assert work.weights == pytest.approx(LAYERS_8B * (0.5 + 2 / 128) + 2 * (128256 + 2048) * 4096)
    assert (
        floor_of(work, step, FORMATS["int4"], FREE).compute
        == floor_of(work_of(LLAMA, FORMATS["bf16"], step), step, FORMATS["bf16"], FREE).compute
    )


def test_held_memory_is_all_weights_and_the_kv():
    assert held_bytes(LLAMA, FORMATS["bf16"], 0) == 2 * LLAMA.parameters
    assert held_bytes(LLAMA, FORMATS["bf16"], 1000) == 2 * LLAMA.parameters + 1000 * 131072


def test_host_launches_may_be_the_limit_without_a_graph():
    slow = replace(CHIPS["h100"], launching=Launching(eager=1.0, graph=0.0, node=0.0))
    chunk = Step(1, 512, 512)
    work = work_of(LLAMA, FORMATS["bf16"], chunk)
    assert floor_of(work, chunk, FORMATS["bf16"], slow).seconds == work.launches
    assert floor_of(work, chunk, FORMATS["bf16"], slow).binds == "launches"
    decode = Step(1, 1, 512)
    assert floor_of(work_of(LLAMA, FORMATS["bf16"], decode), decode, FORMATS["bf16"], slow).seconds < 0.01


def test_page_has_every_model_format_and_step(tmp_path, capsys):
    gpu_roofline.main(["--results", str(tmp_path), "--context", "2048"])
    data = json.loads((tmp_path / "gpu_roofline.json").read_text())
    assert {name: len(lines) for name, lines in data["steps"].items()} == {"h100": 48, "h200": 48}
    text = (tmp_path / "gpu_roofline.md").read_text()
    assert "Decodes see 2,048 tokens" in text and "prefill of 2,048" in text
    assert "does not fit" in text  # 30B in bf16 with 256 rows on 80 GB
    assert text in capsys.readouterr().out


def test_measurement_is_compared_with_the_floor_of_its_own_steps(tmp_path):
    step = {"model": "llama-8b", "format": "bf16", "rows": 1, "queries": 1, "context": 1024}
    line = gpu_roofline.calculated("llama-8b", "bf16", Step(1, 1, 1024), CHIPS["h200"])
    file = tmp_path / "first_hour.json"
    kernels = [
        {"kernel": "attend", "launches": 32, "seconds": 3e-3},
        {"kernel": "add", "launches": 64, "seconds": 1e-3},
    ]
    models = [{"model": "llama-8b", "format": "bf16", "kernels": {"1": kernels}}]
    steps = [step | {"seconds": 2 * line["floor_s"]}]
    file.write_text(json.dumps({"chip": "h200", "device": "D", "steps": steps, "models": models}))
    gpu_roofline.main(["--results", str(tmp_path), "--measured", str(file)])
    text = (tmp_path / "gpu_measured.md").read_text()
    assert "| llama-8b | decode of 1 at 1,024 | bf16 |" in text and "| 2.00 |" in text
    assert "| attend | 32 | 3,000 | 75% |" in text and "| all | 96 | 4,000 | 100% |" in text


def test_measurements_of_one_device_are_shown_together(tmp_path):
    facts = {"chip": "h100", "device": "D"}
    step = {"model": "llama-8b", "format": "bf16", "rows": 1, "queries": 1, "context": 1024, "seconds": 1.0}
    attention = {"part": "prompts", "name": "8k", "seconds": 2e-3, "floor_s": 1e-3, "ratio": 2.0, "error": 1e-3}
    product = {"part": "products", "tokens": 16, "seconds": 5e-5}
    results = [
        attention | {"library_s": 4e-3},
        attention | {"name": "other", "library_s": float("nan")},
        *(product | {"name": f"{form} 8x4"} for form in ("bf16", "int4")),
    ]
    given = [facts | {"steps": [step]}, facts | {"steps": [step | {"rows": 32}]}, facts | {"results": results}]
    files = [tmp_path / f"{index}.json" for index in range(3)]
    for file, each in zip(files, given, strict=True):
        file.write_text(json.dumps(each))
    gpu_roofline.main(["--results", str(tmp_path), "--measured", *map(str, files)])
    text = (tmp_path / "gpu_measured.md").read_text()
    assert "decode of 1 at" in text and "decode of 32 at" in text
    assert "| prompts: 8k | 1,000 | 2,000 | 2.00 | 4,000 | 1.0e-03 |" in text
    assert "| prompts: other | 1,000 | 2,000 | 2.00 |  | 1.0e-03 |" in text
    assert "| weight, tokens | bf16 | int4 |" in text and "| 8x4, 16 | 50 | 50 |" in text
    files[1].write_text(json.dumps(given[1] | {"device": "E"}))
    with pytest.raises(SystemExit, match="different devices: D, E"):
        gpu_roofline.main(["--results", str(tmp_path), "--measured", *map(str, files)])


def test_device_without_a_floor_is_not_compared(tmp_path, capsys):
    file = tmp_path / "first_hour.json"
    file.write_text(json.dumps({"chip": "", "device": "NVIDIA A100", "steps": []}))
    gpu_roofline.main(["--results", str(tmp_path), "--measured", str(file)])
    assert "no floor is known for NVIDIA A100" in capsys.readouterr().out


@pytest.mark.parametrize(("key", "word"), [("model", "smollm2"), ("format", "int4")])
def test_measurement_of_an_unknown_model_or_format_is_rejected(key, word):
    step = {"model": "llama-8b", "format": "bf16", "rows": 1, "queries": 1, "context": 1, "seconds": 1.0}
    with pytest.raises(SystemExit, match=word):
        gpu_roofline.compared({"chip": "h100", "steps": [step | {key: "x"}]})
    with pytest.raises(SystemExit, match="h200"):
        gpu_roofline.compared({"chip": "x", "steps": []})


def test_documented_measurements_are_those_of_the_results():
    root = Path(gpu_roofline.__file__).resolve().parents[1]
    text = (root / "plugins" / "gpu_cuda" / "README.md").read_text()
    shown = [line for line in text.splitlines() if line.startswith("| llama-8b | ")]
    found = (root / "benchmarks" / "results" / "gpu_measured.md").read_text().splitlines()
    assert len(shown) == 7 and set(shown) <= set(found)
