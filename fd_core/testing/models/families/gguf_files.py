"""GGUF files of a model, converted as llama.cpp does: names are from the map of the `gguf` package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.gguf_family import Gguf
from fd_core.testing.models.arrays import Floats

KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_count": ("moe_num_shared_experts",),
    "leading_dense_block_count": ("moe_layer_start_index",),
    "interleave_moe_layer_step": ("moe_layer_interval",),
}
"""Metadata of an architecture, and the fields of `config.json` that the converter writes there, whichever exists."""
_SUFFIXES: Final = (".weight", ".bias")


class NamelessTensor(AssertionError):
    """llama.cpp has no name for a tensor."""


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


def convert(original: Checkpoint, arch: str, stored: Gguf, config: Mapping[str, Any], path: Path) -> Path:
    """Write a GGUF file of a model with this whole config, its values changed as the family declares.

    Raises `NamelessTensor`, and `AssertionError` if the GGUF reader of `transformers` does not revert the changes.
    """
    kind = next((each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), None)
    assert kind is not None, f"the gguf package has no architecture {arch}"
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    tensors: dict[str, Floats] = {}
    experts: dict[str, dict[int, Floats]] = defaultdict(dict)
    for name in original.names():
        value = original.read(name).to_float32()
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            index, _, projection = rest.partition(".")
            experts[f"{layer}.experts.{projection}"][int(index)] = value
            continue
        given = names.get_name(name.replace("e_score_correction_bias", "e_score_correction.bias"), _SUFFIXES)
        if given is None:
            raise NamelessTensor(f"llama.cpp has no name for {name} in {arch}")
        tensors[given] = changed = _changed(stored, name, value, config)
        _require_reverted(arch, given, value, changed, config)
    for name, parts in experts.items():
        tensors[names.get_name(name, _SUFFIXES)] = np.stack([parts[index] for index in sorted(parts)])
    metadata = {f"{arch}.{key}": value for key, value in _metadata(config).items()}
    return write_gguf(path, arch, metadata, tensors)


def _changed(stored: Gguf, name: str, value: Floats, config: Mapping[str, Any]) -> Floats:
    if name.endswith("norm.weight"):
        return value + np.float32(stored.norm_offset)
    if stored.permuted and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        rows = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(value.shape))
    return np.squeeze(value)


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
        same = np.allclose(found, np.squeeze(value), atol=3e-7)
        assert same, f"transformers reads other values of {name} in {arch}"


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    found = dict[str, Any]()
    for key, fields in KEYS.items():
        values = [config[field] for field in fields if config.get(field) is not None]
        found |= {key: values[0]} if values else {}
    rope = config.get("rope_parameters") or {}
    if (local := rope.get("sliding_attention")) is not None:
        found["rope.freq_base_swa"] = local["rope_theta"]
        rope = rope["full_attention"]
    return found | {"rope.freq_base": rope["rope_theta"]} if "rope_theta" in rope else found
