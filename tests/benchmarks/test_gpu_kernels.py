"""The measurement of kernels, in small on the CPU."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("fd_gpu_cuda")

import gpu_kernels


def test_every_case_is_measured_and_near_float32(tmp_path):
    output = tmp_path / "kernels.json"
    gpu_kernels.main(["--device", "cpu", "--output", str(output)])
    found = json.loads(output.read_text())["results"]
    parts = {part: [each for each in found if each["part"] == part] for part in ("decodes", "prompts", "products")}
    assert [each["name"] for each in parts["decodes"]][: len(gpu_kernels.DECODES)] == list(gpu_kernels.DECODES)
    assert [each["name"] for each in parts["prompts"]] == list(gpu_kernels.PROMPTS)
    assert {each["name"].split()[0] for each in parts["products"]} == {"bf16", *gpu_kernels.FORMS}
    assert all(each["seconds"] > 0 and each.get("error", 0) < 0.05 for each in found)
    assert all(each["ratio"] > 1 for each in (*parts["decodes"], *parts["prompts"]))


def test_wrong_attention_shows_as_an_error(tmp_path, monkeypatch):
    right = gpu_kernels.TorchOps.paged_attention
    monkeypatch.setattr(gpu_kernels.TorchOps, "paged_attention", lambda *given: 1.1 * right(*given))
    output = tmp_path / "kernels.json"
    gpu_kernels.main(["--device", "cpu", "--only", "decodes", "--output", str(output)])
    assert all(each["error"] > 0.05 for each in json.loads(output.read_text())["results"])


def test_part_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "products", lambda *given: 1 / 0)
    monkeypatch.setattr(gpu_kernels, "DECODES", {"1 x 1k": [1024]})
    output = tmp_path / "kernels.json"
    with pytest.raises(SystemExit, match="failed: products"):
        gpu_kernels.main(["--device", "cpu", "--only", "products", "decodes", "--output", str(output)])
    failed, *others = json.loads(output.read_text())["results"]
    assert "ZeroDivisionError" in failed["failed"] and len(others) == 1 + len(gpu_kernels.DRAFTED)
