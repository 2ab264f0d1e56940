"""Measurements of the first hour, with the CPU as the device and a model of a few thousand weights."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import gpu_first_hour
import gpu_roofline
from harness import gpu_device
from harness.random_model import RandomCheckpoint
from harness.roofline import FORMATS
from harness.stepping import limits_for

from fd_core.models.registry import load_model, spec_of
from fd_core.ops.torch.ops import TorchOps
from fd_core.ops.weights import WEIGHT_FORMATS, PackedTensor
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess
from fd_core.simulation.costs.calculating import ARCHITECTURES, ModelShape

TINY = ModelShape("tiny", 2, 64, 4, 2, 16, 96, 300, 256)
MIXTURE = ModelShape("tiny mixture", 2, 64, 4, 2, 16, 128, 300, 256, experts=8, experts_per_token=2)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", TINY)
    made = iter(range(100))
    return gpu_first_hour.Bench(
        lambda form: (TorchOps("bfloat16"), lambda model: f"torch, {model.vocab_size} tokens"),
        lambda: 10**8,
        lambda: next(made),
        TorchPostprocess,
        40,
        24,
        (1, 3),
    )


@pytest.mark.parametrize("shape", [TINY, MIXTURE, *(ARCHITECTURES[name] for name in ("smollm2", "qwen3-30b-a3b"))])
def test_random_model_has_the_parameters_of_its_shape(shape):
    spec = spec_of(RandomCheckpoint(shape))
    count = sum(tensor[1][0] * (tensor[1][1] if len(tensor[1]) > 1 else 0) for tensor in spec.tensors())
    assert count == shape.parameters


@pytest.mark.parametrize("shape", [TINY, MIXTURE])
@pytest.mark.parametrize("form", FORMATS)
def test_random_model_loads_in_each_form(shape, form):
    model = load_model(RandomCheckpoint(shape, form), TorchOps("float32"), 64)
    assert model.vocab_size == 300
    checkpoint = RandomCheckpoint(shape, form)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert isinstance(checkpoint.read_weight(name, WEIGHT_FORMATS), PackedTensor) == (form != "bf16")
    assert not isinstance(checkpoint.read_weight("lm_head.weight", WEIGHT_FORMATS), PackedTensor)


def test_limits_hold_the_largest_decode_and_the_prefill():
    limits = limits_for(rows=256, context=1024, prefill=2048, vocab_size=300, steps=64)
    assert limits.max_model_len > 2048 and limits.max_num_batched_tokens == 2048
    assert limits.num_kv_blocks * limits.block_size >= 256 * (1024 + 64)


def test_every_batch_and_the_prefill_are_measured(bench, tmp_path):
    output = tmp_path / "found.json"
    found = {"chip": "h100", "device": "D", "steps": [], "models": []}
    assert gpu_first_hour.run(bench, ["tiny"], ["bf16"], 8, found, output) == []
    found = json.loads(output.read_text())
    assert [(each["rows"], each["queries"], each["context"]) for each in found["steps"]] == [
        (1, 1, 40),
        (3, 1, 40),
        (1, 24, 24),
    ]
    assert all(each["launch_s"] > 0 and each["seconds"] > 0 for each in found["steps"])
    facts = found["models"][0]
    assert facts["batches"] == [1, 3]
    assert facts["computed_by"] == "torch, 300 tokens"
    assert facts["kernels_made_later"] == 1  # the increment of the fake counter between two reads
    assert facts["kv_copies"]["export"] > 0
    compared = gpu_roofline.compared(found)
    assert len(compared) == 3 and all(each["ratio"] > 1 for each in compared)


def test_models_larger_than_the_device_are_skipped_with_a_reason(bench, tmp_path):
    bench._free = lambda: 10**3
    found = {"steps": [], "models": []}
    gpu_first_hour.run(bench, ["tiny"], ["bf16"], 8, found, tmp_path / "found.json")
    assert "do not fit" in found["models"][0]["skipped"]


def test_model_that_fails_does_not_stop_the_next_one(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ARCHITECTURES, "broken", ModelShape("broken", 2, 64, 3, 2, 16, 96, 300, 256))
    found = {"steps": [], "models": []}
    assert gpu_first_hour.run(bench, ["broken", "tiny"], ["bf16"], 8, found, tmp_path / "f.json") == ["broken bf16"]
    assert "not a multiple of" in found["models"][0]["failed"]
    assert len(found["steps"]) == 3


@pytest.mark.parametrize(
    ("name", "chip"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA H100 PCIe", ""), ("NVIDIA A100-SXM4", "")],
)
def test_device_is_known_by_its_name(name, chip):
    assert gpu_device.chip_of(name) == chip


def test_kernels_are_summed_by_name_and_per_step():
    def event(name, kind, us):
        return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda: us))

    events = [event("a", "DeviceType.CUDA", 2.0), event("b", "DeviceType.CUDA", 8.0), event("c", "DeviceType.CPU", 9.0)]
    rows = gpu_device._by_name([*events, event("a", "DeviceType.CUDA", 4.0)], 2)
    assert [(row["kernel"], row["launches"], pytest.approx(row["seconds"])) for row in rows] == [
        ("b", 0.5, 4e-6),
        ("a", 1.0, 3e-6),
    ]
