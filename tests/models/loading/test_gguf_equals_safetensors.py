"""A model converted to GGUF reads the same as from safetensors: names, values and config.

The GGUF names are from the map of the `gguf` package and the value changes are those of llama.cpp's converter, so the
loader's tables are checked against both.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.opening import open_checkpoint
from tests.models.loading.tiny_gguf import write_gguf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
ERNIE_MOE = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
CASES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3moe", QWEN_MOE),
    "gemma3_text": ("gemma3", {"sliding_window": 16, "query_pre_attn_scalar": 8}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5-moe", ERNIE_MOE),
}


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """Return the same random model as a safetensors folder and as a GGUF file."""
    model_type = request.param
    arch, extra = CASES[model_type]
    folder = tmp_path_factory.mktemp(model_type)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SMALL, **extra)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    original = open_checkpoint(folder)
    return original, open_checkpoint(_converted(original, arch, folder / "model.gguf"))


def _converted(original: Checkpoint, arch: str, path: Path) -> Path:
    """Convert as llama.cpp's converter does."""
    config = original.config
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name in original.names():
        value = original.read(name).to_float32()
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            index, _, projection = rest.partition(".")
            experts[f"{layer}.experts.{projection}"][int(index)] = value
            continue
        tensors[names.get_name(_mapped(name), (".weight", ".bias"))] = _changed(arch, name, value, config)
    for name, parts in experts.items():
        tensors[names.get_name(name, (".weight",))] = np.stack([parts[index] for index in sorted(parts)])
    return write_gguf(path, arch=arch, values=_values(config), tensors=tensors)


def _mapped(name: str) -> str:
    return name.replace("e_score_correction_bias", "e_score_correction.bias")


def _changed(arch: str, name: str, value: np.ndarray, config: Any) -> np.ndarray:
    if arch == "gemma3" and name.endswith("norm.weight"):
        return value + 1
    if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        rows = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(value.shape))
    return np.squeeze(value) if "e_score_correction" in name else value


def _values(config: Any) -> dict[str, Any]:
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.freq_base": 10000.0,
    }
    optional = {
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_local_experts",  # transformers 5 spelling of num_experts
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }
    ernie = {
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_shared_count": "moe_num_shared_experts",
        "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
    }
    for table in (optional, ernie):
        values |= {key: config[name] for key, name in table.items() if config.get(name) is not None}
    return values


def test_tensors_have_equal_names_shapes_and_values(pair: tuple[Checkpoint, Checkpoint]) -> None:
    original, converted = pair
    tied = {"lm_head.weight"} if original.config["tie_word_embeddings"] else set()
    assert set(converted.names()) - tied == set(original.names()) - tied
    for name in converted.names():
        expected = original.read(name).to_float32()
        assert converted.shape(name) == expected.shape, name
        np.testing.assert_allclose(converted.read(name).to_float32(), expected, atol=3e-7, err_msg=name)


def test_configs_are_equal(pair: tuple[Checkpoint, Checkpoint]) -> None:
    """Every common key has the same value, and the model's shape is included."""
    original, converted = pair
    ids = {
        "bos_token_id",
        "eos_token_id",
        "rope_scaling",
        "rope_theta",
    }  # ids are not written; rope has two spellings
    shared = (original.config.keys() & converted.config.keys()) - ids
    assert {"hidden_size", "head_dim", "architectures", "model_type", "vocab_size"} <= shared
    for key in shared:
        assert converted.config[key] == original.config[key], key
