"""GGUF files of a model, converted as llama.cpp does: names are from the map of the `gguf` package."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from fd_core.models.families.spec import RopeSpec
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.gguf_family import CONVERTED, Gguf
from fd_core.testing.models.arrays import Floats

_ROPE: Final = {"rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"}
_LATENT: Final = {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
_UNWRITTEN: Final[Mapping[str, str]] = {
    **dict.fromkeys(("llama", "starcoder2"), "sliding_window"),
    "qwen35moe": "intermediate_size",
    **dict.fromkeys(("olmoe", "qwen2moe", "qwen3moe", "qwen3next"), "norm_topk_prob"),
}
"""Fields among them that the converter does not write for an architecture."""
_HYBRIDS: Final = ("lfm2", "granitehybrid", "nemotron_h", "nemotron_h_moe", "qwen3next", "qwen35", "qwen35moe")
_RECURRENT: Final = {
    *("layer_types", "layers_block_type", "num_hidden_layers", "mamba_expand", "mamba_d_head", "mamba_head_dim"),
    *("linear_value_head_dim", "full_attention_interval"),
    *("conv_bias", "mamba_conv_bias", "mamba_proj_bias", "use_bias", "use_conv_bias", "attention_bias", "mlp_bias"),
}
"""Fields that files of models with recurrent layers hold as lists, sizes or tensors."""
_SUFFIXES: Final = (".weight", ".bias")
_ROTATES_ADJACENT: Final = {
    *("arcee", "arctic", "baichuan", "bailingmoe", "chameleon", "chatglm", "cohere2", "command-r", "deci", "deepseek"),
    *("deepseek2", "ernie4_5", "ernie4_5-moe", "granite", "granitehybrid", "granitemoe", "internlm2", "llada", "llama"),
    *("llama-embed", "llama4", "maincoder", "minicpm", "mistral3", "neo-bert", "olmo", "plm", "smollm3", "xverse"),
}
"""Architectures of which llama.cpp rotates adjacent elements, by `llama_model_rope_type`."""


class NamelessTensor(AssertionError):
    """llama.cpp has no name for a tensor."""


_PREDICTING: Final = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
"""Parts of a layer for multi-token prediction that others lack."""


def write_gguf(path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Write metadata under their whole names, and tensors: arrays, or (bytes, type) pairs."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            data, kind = tensor
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def is_permuted(arch: str, ropes: Iterable[RopeSpec]) -> bool | None:
    """Return True if the converter permutes q and k of a model that rotates with `ropes`; None if any way is right."""
    turning = [rope for rope in ropes if any(rope.inverse_frequencies)]
    return arch in _ROTATES_ADJACENT and not any(rope.interleaved for rope in turning) if turning else None


def written_fields(arch: str) -> set[str]:
    """Return the fields of `config.json` that the converter writes in some form."""
    fields = {field for names in CONVERTED.values() for field in names} | _ROPE | _LATENT | {"tie_word_embeddings"}
    return fields - {_UNWRITTEN.get(arch)} | (_RECURRENT if arch in _HYBRIDS else set())


def kept_fields(arch: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `config.json` among these that a file holds; of DeepSeek's two `mscale` it has one."""
    written = written_fields(arch)
    kept = {field: given[field] for field in given if field in written}
    rope = kept.get("rope_parameters", {})
    if arch == "deepseek2" and "mscale_all_dim" in rope:
        kept["rope_parameters"] = rope | {"mscale": rope["mscale_all_dim"]}
    return kept


def convert(
    original: Checkpoint, arch: str, stored: Gguf, config: Mapping[str, Any], path: Path, *, predicting: int = 0
) -> Path:
    """Write a GGUF file of a model with this whole config, its values changed as the family declares.

    So many layers after those of the model are `predicting` further tokens.

    Raises `NamelessTensor`, and `AssertionError` if the GGUF reader of `transformers` does not revert the changes.
    """
    layers = len(config.get("layers_block_type") or range(config["num_hidden_layers"]))
    known = next((each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), None)
    assert known is not None, f"the gguf package has no architecture {arch}"
    names = gguf.get_tensor_name_map(known, layers + predicting)
    if arch.startswith("nemotron_h") and ("moe" in config["layers_block_type"]) != arch.endswith("_moe"):
        raise NamelessTensor(f"llama.cpp has no such layers in {arch}")
    tensors = _rope_factors(config)
    experts: dict[str, dict[int, Floats]] = defaultdict(dict)
    for name in original.names():
        value = original.read(name).to_float32()
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        whole = name.removesuffix("_bias")
        if whole.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            block, _, part = whole.rpartition(".")
            kind, rows = ("weight", value.swapaxes(1, 2)) if name == whole else ("bias", value)
            count = part.count("_")
            alternating = [rows[:, index::count] for index in range(count)]
            halves = alternating if arch == "gpt-oss" else np.split(rows, count, axis=1)
            for each, half in zip(part.split("_")[:-1], halves, strict=True):
                tensors[f"{names.get_name(f'{block}.{each}_proj')}.{kind}"] = np.ascontiguousarray(half)
            continue
        if ".experts." in name:
            layer, _, rest = name.replace(".mixer.", ".mlp.").partition(".experts.")
            index, _, projection = rest.partition(".")
            experts[f"{layer}.experts.{projection}"][int(index)] = value
            continue
        if name.endswith(".input_linear.weight"):  # gate and up of all experts, or of those that each token uses
            kind = "_exps" if value.ndim > 2 else "_shexp" if config.get("num_local_experts") else ""
            for part, half in zip(("gate", "up"), np.split(value, 2, axis=-2), strict=True):
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}{kind}.weight"] = half
            continue
        if name.endswith("in_proj_qkvz.weight"):
            rows = value.reshape(config["linear_num_key_heads"], -1, value.shape[-1])
            key, layer = config["linear_key_head_dim"], f"blk.{name.split('.')[2]}"
            q, k, v, z = np.split(rows, [key, 2 * key, key + rows.shape[1] // 2], axis=1)
            tensors[f"{layer}.attn_qkv.weight"] = np.concatenate(
                [each.reshape(-1, value.shape[-1]) for each in (q, k, v)]
            )
            tensors[f"{layer}.attn_gate.weight"] = np.ascontiguousarray(z).reshape(-1, value.shape[-1])
            continue
        if name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
            tensors[f"blk.{name.split('.')[2]}.ffn_down.weight"] = value
            continue
        if arch == "deepseek2" and name.endswith("kv_b_proj.weight"):
            layer, key = f"blk.{name.split('.')[2]}", config["qk_nope_head_dim"]
            heads = value.reshape(config["num_attention_heads"], key + config["v_head_dim"], -1)
            tensors[f"{layer}.attn_k_b.weight"] = np.ascontiguousarray(heads[:, :key].swapaxes(1, 2))
            tensors[f"{layer}.attn_v_b.weight"] = np.ascontiguousarray(heads[:, key:])
            continue
        known_as = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(
            ".dt_bias", ".dt_proj.bias"
        )
        if arch.startswith("nemotron_h"):
            known_as = known_as.replace("model.", "backbone.", 1)
        given = names.get_name(known_as, _SUFFIXES)
        part = known_as.removeprefix(f"model.layers.{layers}.").removesuffix(".weight")
        if predicting and part in _PREDICTING:  # the package knows them of fewer architectures than llama.cpp
            given = f"blk.{layers}.nextn.{part.replace('.', '_')}.weight"
        if given is None:
            raise NamelessTensor(f"llama.cpp has no name for {name} in {arch}")
        given += "" if given.endswith((*_SUFFIXES, ".ssm_a", ".ssm_d")) else ".weight"
        tensors[given] = changed = _changed(stored, name, value, config)
        _require_reverted(arch, given, value, changed, config)
    for name, parts in experts.items():
        tensors[names.get_name(name, _SUFFIXES)] = np.stack([parts[index] for index in sorted(parts)])
    metadata = {f"{arch}.{key}": value for key, value in _metadata(arch, config).items()}
    if predicting:
        metadata |= {f"{arch}.block_count": layers + predicting, f"{arch}.nextn_predict_layers": predicting}
    if arch == "lfm2":
        metadata["lfm2.feed_forward_length"] = tensors["blk.0.ffn_up.weight"].shape[0]
    return write_gguf(path, arch, metadata, tensors)


def _tiled(name: str, value: Floats, config: Mapping[str, Any]) -> Floats:
    """Order the heads of values in turns of one for each head of keys."""
    keys, heads, size = (config[f"linear_{each}"] for each in ("num_key_heads", "num_value_heads", "value_head_dim"))
    if name.endswith("out_proj.weight"):
        return value.reshape(len(value), keys, -1, size).swapaxes(1, 2).reshape(value.shape)
    width = size if name.endswith(("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight")) else 1
    before, values = np.split(value, [len(value) - heads * width])
    turns = values.reshape(keys, -1, width, *value.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    return np.concatenate([before, turns])


def _changed(stored: Gguf, name: str, value: Floats, config: Mapping[str, Any]) -> Floats:
    if stored.tiled and ".linear_attn." in name and not name.endswith("norm.weight"):
        value = _tiled(name, value, config)
    if name.endswith(".A_log"):
        return -np.exp(value if ".linear_attn." in name else value[:, np.newaxis])
    if name.endswith(".D"):
        return value[:, np.newaxis]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return value.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return value + np.float32(stored.norm_offset)
    if stored.permuted and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        rows = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(value.shape))
    return value if name.endswith("e_score_correction_bias") else np.squeeze(value)


def _require_reverted(arch: str, name: str, value: Floats, changed: Floats, config: Mapping[str, Any]) -> None:
    """Compare with the reader of `transformers`, if it has one: what the family declares proves nothing by itself."""
    from transformers.modeling_gguf_pytorch_utils import (
        GGUF_SUPPORTED_ARCHITECTURES,
        TENSOR_PROCESSORS,
        TensorProcessor,
    )

    if arch in GGUF_SUPPORTED_ARCHITECTURES:
        processor = TENSOR_PROCESSORS.get(arch, TensorProcessor)(config=dict(config))
        found = processor.process(changed, name).weights
        same = np.allclose(np.squeeze(found), np.squeeze(value), atol=3e-7)
        assert same, f"transformers reads other values of {name} in {arch}"


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rope parameters, those of full attention if layers differ."""
    found: Mapping[str, Any] = config.get("rope_parameters") or {}
    return found.get("full_attention", found)


def _rope_factors(config: Mapping[str, Any]) -> dict[str, Floats]:
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], "f4") for kind in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    width, names = config["head_dim"], ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    low, high, context = (rope[name] for name in names)
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    smooth = np.clip((context / lengths - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / rope["factor"] + smooth)).astype("f4")}


def _metadata(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    found, written = dict[str, Any](), written_fields(arch)
    for key, fields in CONVERTED.items():
        values = [config[field] for field in fields if field in written and config.get(field) is not None]
        found |= {key: values[0]} if values else {}
    if config.get("sliding_window") and config.get("layer_types"):
        found["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    if "kv_lora_rank" in config:
        rotated = config["qk_rope_head_dim"]
        found |= {
            "rope.dimension_count": rotated,
            "attention.key_length": config["qk_nope_head_dim"] + rotated,
            "attention.value_length": config["v_head_dim"],
        }
    if arch == "deepseek2":
        rank, kinds = config["kv_lora_rank"], config.get("mlp_layer_types") or []
        found |= {f"{key}_mla": found[key] for key in ("attention.key_length", "attention.value_length")}
        found |= {"attention.head_count_kv": 1, "attention.key_length": rank + rotated, "attention.value_length": rank}
        found["expert_gating_func"] = 1 if config["model_type"] == "deepseek_v2" else 2
        if kinds:
            found["leading_dense_block_count"] = count = kinds.index("sparse")
            if "dense" in kinds[count:]:
                raise NamelessTensor("llama.cpp has no dense layers after those with experts")
        if (weight := _rope(config).get("mscale_all_dim")) is not None:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * weight
    kinds = config.get("layers_block_type") or config.get("layer_types") or []
    if arch in ("qwen3next", "qwen35", "qwen35moe"):
        found["ssm.inner_size"] = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    elif arch in _HYBRIDS:
        found["block_count"] = len(kinds)
        found["rope.dimension_count"] = config["hidden_size"] // found["attention.head_count"]
        count = found["attention.head_count_kv"]
        found["attention.head_count_kv"] = [count * (kind in ("full_attention", "attention")) for kind in kinds]
        heads = found.get("ssm.time_step_rank", 0)
        if arch == "granitehybrid":
            found["ssm.inner_size"] = config["mamba_expand"] * config["hidden_size"]
            found["rope.scaling.finetuned"] = config["position_embedding_type"] == "rope"
        if arch.startswith("nemotron_h"):
            found["ssm.inner_size"] = heads * config["mamba_head_dim"]
            found["feed_forward_length"] = [
                found["feed_forward_length"] * (kind == "mlp")
                or found.get("expert_feed_forward_length", 0) * (kind == "moe")
                for kind in kinds
            ]
    if "intermediate_size_mlp" in config:
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if arch == "llama4" and set(config["layer_types"]) == {"full_attention"}:
        found["attention.sliding_window"] = 0
    if (local := (config.get("rope_parameters") or {}).get("sliding_attention")) is not None:
        found["rope.freq_base_swa"] = local["rope_theta"]
    return found | _rope_metadata(_rope(config), config)


def _rope_metadata(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    found = {"rope.freq_base": rope["rope_theta"]} if "rope_theta" in rope else {}
    width = config.get("head_dim") or config["qk_rope_head_dim"]
    kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
    if share := rope.get("partial_rotary_factor") or config.get("partial_rotary_factor"):
        found["rope.dimension_count"] = int(width * share)
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if kind == "dynamic" and "alpha" in rope:
        found["rope.freq_base"] *= rope["alpha"] ** (width / (width - 2))
    if original is not None:
        found["rope.scaling.original_context_length"] = original
    if original is not None and kind == "longrope":
        scale = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        found["rope.scaling.attn_factor"] = factor
    return found
