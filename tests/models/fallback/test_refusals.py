"""Models and settings that the code of `transformers` cannot serve here are refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fd_core.backends.cpu import CpuBackend, ReferenceBackend
from fd_core.config import EngineConfig
from fd_core.engine.loaded_adapters import EngineAdapters
from fd_core.errors import ConfigError, FdError, ModelError
from fd_core.models.fallback import choice
from fd_core.models.fallback.attention import AttentionCalls
from fd_core.models.fallback.choice import choose_implementation
from fd_core.models.opening import open_checkpoint
from tests.models.fallback.written import GROUPED, change_config, load, write

UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "Bert": ({**GROUPED, "is_decoder": False}, "not causal"),
    "Bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4}, "does not use the attention interface"),
    "Doge": ({**GROUPED, "num_experts": 16}, "Mask"),
    "GptOss": ({**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, "attention sinks"),
    "MiniMax": ({**GROUPED, "num_local_experts": 4}, "only 1 of its 2 layers"),
    "Rwkv": ({"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}, "recurrent states"),
}


def choose(folder: Path, setting: str, framework: str | None = "torch") -> str:
    with open_checkpoint(folder) as checkpoint:
        return choose_implementation(checkpoint, setting, framework)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_attention_is_named(tmp_path: Path, name: str) -> None:
    fields, reason = UNSUPPORTED[name]
    write(name, tmp_path, **fields)
    with pytest.raises(ModelError, match=f"cannot serve {name}[A-Z].*: .*{reason}"):
        load(tmp_path)


def test_auto_prefers_families(tmp_path: Path) -> None:
    write("Llama", tmp_path / "llama", **GROUPED)
    write("GPTJ", tmp_path / "gptj")
    assert [choose(tmp_path / "llama", each) for each in ("auto", "fd_core", "transformers")] == [
        "fd_core",
        "fd_core",
        "transformers",
    ]
    assert choose(tmp_path / "gptj", "auto") == "transformers"
    with pytest.raises(ModelError, match="unsupported architecture 'GPTJForCausalLM'"):
        choose(tmp_path / "gptj", "fd_core")


def test_extra_that_is_missing_is_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("GPTJ", tmp_path)
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    for setting in ("auto", "transformers"):
        with pytest.raises(ModelError) as refused:
            choose(tmp_path, setting)
        assert "fd-core[transformers]" in str(refused.value)


def test_arrays_that_torch_cannot_share_are_refused(tmp_path: Path) -> None:
    write("GPTJ", tmp_path)
    backend = ReferenceBackend(EngineConfig(model=str(tmp_path), backend="reference"))
    ops = backend.make_ops()
    ops.framework = "paddle"
    with pytest.raises(ModelError) as refused:
        backend.load_model(tmp_path, ops, lambda *_: None)
    assert "GPTJForCausalLM" in str(refused.value)
    assert "use --backend cpu" in str(refused.value)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    write("GPTJ", tmp_path)
    (tmp_path / "modeling.py").write_text("raise SystemExit")
    code = {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
    change_config(tmp_path, auto_map=code, attn_implementation="a/kernel", _experts_implementation="a/kernel")
    load(tmp_path)
    change_config(tmp_path, architectures=["MyForCausalLM"])
    with pytest.raises(ModelError, match=r"auto_map\) is never run"):
        choose(tmp_path, "transformers")


@pytest.mark.parametrize("setting", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_several_ranks_are_refused_before_they_start(tmp_path: Path, setting: dict[str, int]) -> None:
    write("GPTJ", tmp_path)
    with pytest.raises(ConfigError, match="one rank, got 2"):
        CpuBackend.require_division(EngineConfig(model=str(tmp_path), backend="cpu", **setting), tmp_path)


def test_quantization_is_refused(tmp_path: Path) -> None:
    write("GPTJ", tmp_path)
    with pytest.raises(ConfigError, match="--quantization int8"):
        load(tmp_path, quantization="int8")


def test_adapters_are_refused(tmp_path: Path) -> None:
    write("GPTJ", tmp_path / "model")
    (tmp_path / "adapter").mkdir()
    config = EngineConfig(model=str(tmp_path), lora_modules=(f"a={tmp_path / 'adapter'}",))
    with pytest.raises(ModelError, match="a model that transformers computes has no adapters"):
        EngineAdapters(config, tmp_path / "model")


def test_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    write("GPTJ", tmp_path)
    with pytest.raises(ConfigError, match="max_model_len=257 exceeds the model's context"):
        load(tmp_path, max_model_len=257)


def test_rotation_that_depends_on_the_batch_limits_the_context(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    write("Helium", tmp_path, rope_parameters=rope)
    assert load(tmp_path)[0].max_positions == 64
    with pytest.raises(ConfigError, match=r"context \(64 tokens\)"):
        load(tmp_path, max_model_len=65)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    write("Helium", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"tensor 'model.layers.1.mlp.up_proj.weight'"):
        load(tmp_path)


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 10**9}, {"vocab_size": 10**12}, {"hidden_size": 10**7}])
def test_sizes_beyond_the_files_are_refused_before_allocation(tmp_path: Path, fields: dict[str, int]) -> None:
    write("Helium", tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(ModelError):
        load(tmp_path)


def test_logits_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("GPTJ", tmp_path)
    compute = AttentionCalls.compute
    monkeypatch.setattr(AttentionCalls, "compute", lambda *each: compute(*each) * 0.9)
    with pytest.raises(ModelError, match="logits differ from those of transformers by"):
        load(tmp_path)


@pytest.mark.parametrize("count", [10, pytest.param(24, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", [pytest.param("GPTJ", marks=pytest.mark.soak), "Ministral"])
def test_odd_configs_are_served_or_explained(tmp_path: Path, name: str, count: int) -> None:
    write(name, tmp_path)
    usual = (tmp_path / "config.json").read_text()
    fields = [field for field in json.loads(usual) if field != "architectures"]
    odd = (0, -1, 3, 1.5, 10**30, float("nan"), True, "", "silu", [], [1], [None], {}, {"rope_type": "yarn"})
    rng, refused = random.Random(name), 0
    for _ in range(count):
        (tmp_path / "config.json").write_text(usual)
        change = {rng.choice(fields): rng.choice(odd) for _ in range(rng.choice((1, 2)))}
        change_config(tmp_path, **change)
        try:
            load(tmp_path)
        except FdError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"config with {change}") from error
    assert count / 6 < refused < count
