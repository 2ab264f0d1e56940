"""A model converted to GGUF computes the same logits as from safetensors, for every family that llama.cpp converts.

The GGUF names are from the map of the `gguf` package; the metadata and the changes of values are those of llama.cpp's
converter, so the loader's tables are checked against both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from fd_core.models.families.contract import Family
from fd_core.models.families.installed import installed_families
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.models.checkpoints import SIZES
from tests.models.loading.tiny_gguf import write_gguf
from tests.models.paged import PagedDriver

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FAMILIES = {family.model_type: family for family in installed_families().architectures.values()}
CONVERTED_AS = {"internlm3": "llama", "mistral": "llama", "mixtral": "llama", "olmo3": "olmo2"}
"""Families that the converter writes under the name of another one."""
FIXED: dict[str, dict[str, Any]] = {
    "cohere2": {"num_hidden_layers": 4, "layer_types": None, "attention_bias": False, "tie_word_embeddings": True},
    "ernie4_5_moe": {"moe_norm_min": 1e-12},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"layer_types": None, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "nemotron": {"hidden_act": "relu2"},
    "olmoe": {"norm_topk_prob": False},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"norm_topk_prob": False, "decoder_sparse_step": 1, "qkv_bias": True},
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False},
    "starcoder2": {"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"},
}
"""Values that the converter does not write: llama.cpp has them in its code."""
CASES = [(name, case) for name, each in FAMILIES.items() for case in each.cases if each.gguf or name in CONVERTED_AS]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """Return the same random model as a safetensors folder and as a GGUF file."""
    name, case = request.param
    family = FAMILIES[name]
    folder = tmp_path_factory.mktemp(name)
    torch.manual_seed(0)
    fields = {**SIZES, **family.cases[case], **FIXED.get(name, {})}
    if fields.get("layer_types", ...) is None:
        del fields["layer_types"]
    config = transformers.AutoConfig.for_model(name, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text()) | {"architectures": [family.architectures[0]]}
    (folder / "config.json").write_text(json.dumps(written))
    original = open_checkpoint(folder)
    return original, open_checkpoint(_converted(original, config.to_dict(), family, folder / "model.gguf"))


def _converted(original: Checkpoint, config: dict[str, Any], family: Family, path: Path) -> Path:
    """Convert as llama.cpp's converter does."""
    arch = CONVERTED_AS.get(family.model_type) or next(iter(family.gguf))
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    experts: dict[str, dict[int, np.ndarray]] = {}
    tensors = dict(_extra_tensors(config))
    for name in original.names():
        value = original.read(name).to_float32()
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            index, _, projection = rest.partition(".")
            experts.setdefault(f"{layer}.experts.{projection}", {})[int(index)] = value
        elif name.endswith("input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(value, 2, axis=1), strict=True):
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = half
        else:
            mapped = name.replace("e_score_correction_bias", "e_score_correction.bias")
            tensors[names.get_name(mapped, (".weight", ".bias"))] = _changed(arch, name, value, config)
    for name, parts in experts.items():
        tensors[names.get_name(name, (".weight",))] = np.stack([parts[index] for index in sorted(parts)])
    return write_gguf(path, arch=arch, values=_values(arch, config), tensors=tensors)


def _changed(arch: str, name: str, value: np.ndarray, config: Any) -> np.ndarray:
    if arch in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return value + 1
    if arch in ("llama", "granite", "granitemoe", "smollm3") and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        rows = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(value.shape))
    return np.squeeze(value) if "e_score_correction" in name or "shared_expert_gate" in name else value


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    part = config.get("rope_parameters") or {}
    return part.get("full_attention", part)


def _extra_tensors(config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], "f4")
    if rope.get("rope_type") == "llama3":
        d = config["head_dim"]
        lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, d, 2) / d)
        low, high, context = (
            rope[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        smooth = np.clip((context / lengths - low) / (high - low), 0, 1)
        yield "rope_freqs.weight", (1 / ((1 - smooth) / rope["factor"] + smooth)).astype("f4")


_SAME_VALUES = {
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_local_experts", "num_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_topk", "moe_k"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_shared_count": ("moe_num_shared_experts",),
    "leading_dense_block_count": ("moe_layer_start_index",),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "use_parallel_residual": ("use_parallel_residual",),
}


def _values(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    values = {
        key: found[0]
        for key, names in _SAME_VALUES.items()
        if (found := [config[name] for name in names if config.get(name) is not None])
    }
    rope, head_dim = _rope(config), config["head_dim"]
    values["rope.freq_base"] = rope["rope_theta"]
    if config.get("partial_rotary_factor") or rope.get("partial_rotary_factor"):
        share = rope.get("partial_rotary_factor") or config["partial_rotary_factor"]
        values["rope.dimension_count"] = int(head_dim * share)
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "dynamic" and "alpha" in rope:
        values["rope.freq_base"] *= rope["alpha"] ** (head_dim / (head_dim - 2))
    if original := rope.get("original_max_position_embeddings"):
        values["rope.scaling.original_context_length"] = original
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / original
        values["rope.scaling.attn_factor"] = np.sqrt(1 + np.log(scale) / np.log(original)) if scale > 1 else 1.0
    if "sliding_attention" in config["rope_parameters"]:
        values["rope.freq_base_swa"] = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    if arch in ("exaone4", "olmo2") and config.get("sliding_window"):
        values["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    return values


def test_logits_are_equal(pair: tuple[Checkpoint, Checkpoint]) -> None:
    tokens = np.random.default_rng(3).integers(0, SIZES["vocab_size"], 40).tolist()
    found = []
    for checkpoint in pair:
        ops = NumpyOps()
        driver = PagedDriver(load_model(checkpoint, ops, 64), ops, [tokens], 64)
        driver.generate(8, 2)
        found.append(np.stack(driver.rows[0].logits))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-4 * np.abs(found[0]).max())


def test_configs_are_equal(pair: tuple[Checkpoint, Checkpoint]) -> None:
    """Every common key has the same value, and the model's shape is included."""
    original, converted = pair
    spelled = {"architectures", "model_type", "hidden_act", "layer_types", "bos_token_id", "eos_token_id"}
    ropes = {"rope_scaling", "rope_theta", "partial_rotary_factor"}
    shared = (original.config.keys() & converted.config.keys()) - spelled - ropes
    assert {"hidden_size", "head_dim", "vocab_size"} <= shared
    for key in shared:
        assert converted.config[key] == original.config[key], key
