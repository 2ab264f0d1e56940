"""LoRA adapters: compatible ones are read, errors are named before anything is allocated."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fd_core.errors import ModelError
from fd_core.models.loading.adapter import read_adapter
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import spec_of
from fd_core.testing.models.adapters import write_adapter
from fd_core.testing.models.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def spec(model):
    with open_checkpoint(model) as checkpoint:
        return spec_of(checkpoint).adaptable()


@pytest.fixture
def folder(model, tmp_path):
    return write_adapter(model, tmp_path / "adapter", seed=1)


def change_tensors(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {name: np.array(values) for name, values in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def refused(folder, spec, *words: str, most: int = 64) -> None:
    with pytest.raises(ModelError) as caught:
        read_adapter(folder, spec, most)
    error_text = f"{caught.value} {caught.value.hint}"
    assert str(folder) in error_text
    assert [word for word in words if word not in error_text] == []


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def test_adapter_is_read_with_its_scale(folder, spec):
    adapter = read_adapter(folder, spec, 4)
    stored = load_file(folder / "adapter_model.safetensors")
    delta = adapter.deltas["model.layers.0.self_attn.q_proj"]
    np.testing.assert_array_equal(delta.down, stored[f"{Q}.lora_A.weight"])
    np.testing.assert_array_equal(delta.up, stored[f"{Q}.lora_B.weight"] * 2)
    assert (adapter.rank, len(adapter.deltas)) == (4, 21)


def test_rslora_scales_by_root_of_rank(model, spec, tmp_path):
    folder = write_adapter(model, tmp_path / "rs", seed=1, config={"use_rslora": True})
    stored = load_file(folder / "adapter_model.safetensors")[f"{Q}.lora_B.weight"]
    found = read_adapter(folder, spec, 64).deltas["model.layers.0.self_attn.q_proj"].up
    np.testing.assert_array_equal(found, stored * 4)


@pytest.mark.parametrize("change", ["values", "alpha"])
def test_different_adapters_have_different_digests(folder, model, spec, tmp_path, change):
    same = write_adapter(model, tmp_path / "same", seed=1)
    assert read_adapter(same, spec, 64).digest == read_adapter(folder, spec, 64).digest
    if change == "alpha":
        other = write_adapter(model, tmp_path / "other", seed=1, config={"lora_alpha": 9})
    else:
        other = same
        change_tensors(other, lambda tensors: tensors[f"{Q}.lora_A.weight"].fill(9))
    assert read_adapter(other, spec, 64).digest != read_adapter(folder, spec, 64).digest


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"r": 0}, "r must be"),
        ({"r": True}, "r must be"),
        ({"lora_alpha": float("1e400")}, "adapter_config.json"),
        ({"lora_alpha": "much"}, "lora_alpha"),
    ],
)
def test_unsupported_feature_is_rejected_by_field(model, spec, tmp_path, config, word):
    refused(write_adapter(model, tmp_path / "a", seed=1, config=config), spec, word, "adapter_config.json")


def test_rank_above_limit_is_rejected_with_both_values(folder, spec):
    refused(folder, spec, "4", "3", "--max-lora-rank", most=3)


def without(name):
    return lambda tensors: tensors.pop(name)


def put(name, *shape, value=0.0):
    return lambda tensors: tensors.update({name: np.full(shape, value, np.float32)})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (without(f"{Q}.lora_A.weight"), "model.layers.0.self_attn.q_proj"),
        (put(f"{Q}.lora_A.weight", 4, 63), f"{Q}.lora_A.weight"),
        (put(f"{Q}.lora_A.weight", 5, 64), f"{Q}.lora_A.weight"),
        (put(f"{Q}.lora_A.weight", 4, 64, value=np.nan), f"{Q}.lora_A.weight"),
        (put(f"{Q}.lora_B.weight", 64, 4, value=3e38), f"{Q}.lora_B.weight"),
        (put("base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight", 4, 64), "layers.3"),
        (put("base_model.model.lm_head.lora_A.weight", 4, 64), "lm_head"),
        (put("base_model.model.model.embed_tokens.lora_embedding_A", 4, 160), "lora_embedding_A"),
        (put(f"{Q}.lora_magnitude_vector", 64), "lora_magnitude_vector"),
    ],
)
def test_mismatched_tensors_are_named_with_their_file(folder, spec, change, word):
    change_tensors(folder, change)
    refused(folder, spec, word, "adapter_model.safetensors")


def test_module_with_missing_tensors_is_named(folder, spec):
    name = "base_model.model.model.layers.1.mlp.up_proj"
    change_tensors(folder, lambda tensors: [tensors.pop(f"{name}.lora_{side}.weight") for side in "AB"])
    refused(folder, spec, "model.layers.1.mlp.up_proj")


def test_adapter_of_another_model_is_rejected(tmp_path, spec):
    other = write_checkpoint("engine", tmp_path / "other")
    refused(write_adapter(other, tmp_path / "a", seed=1), spec, "another model")


def test_expert_adapters_are_rejected_by_name(tmp_path):
    model = write_checkpoint("qwen3-moe", tmp_path / "model")
    with open_checkpoint(model) as checkpoint:
        spec = spec_of(checkpoint).adaptable()
    folder = write_adapter(model, tmp_path / "a", seed=1, targets=("q_proj",))
    assert len(read_adapter(folder, spec, 64).deltas) == 3
    name = "base_model.model.model.layers.0.mlp.experts.2.up_proj.lora_A.weight"
    change_tensors(folder, put(name, 4, 64))
    refused(folder, spec, name)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_truncated_adapter_is_rejected(folder, spec, keep):
    path = folder / "adapter_model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    refused(folder, spec, "adapter_model.safetensors")


@pytest.mark.parametrize("config", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_invalid_adapter_configs_are_rejected(folder, spec, config):
    (folder / "adapter_config.json").write_bytes(config)
    refused(folder, spec, "adapter_config.json")


def test_pickled_adapter_weights_are_never_opened(folder, spec):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused(folder, spec, "safetensors", "run code")


def test_model_folder_is_rejected_as_adapter(model, spec):
    with pytest.raises(ModelError, match=re.escape("adapter_config.json")):
        read_adapter(model, spec, 64)
