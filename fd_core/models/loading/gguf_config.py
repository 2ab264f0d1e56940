"""A Hugging Face config built from GGUF metadata.

Values that a GGUF file leaves out are those that llama.cpp fixes for the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fd_core.errors import ModelError
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.files import StoredTensor

Tensors = Mapping[str, StoredTensor]

_NO_TOKEN = 0xFFFFFFFF


def token_id(metadata: ModelConfig, key: str) -> int | None:
    """Return a token id, or None if the key is absent or says that there is none."""
    return None if metadata.values.get(key) in (None, _NO_TOKEN) else metadata.index(key, 0)


def config_from(metadata: ModelConfig, tensors: Tensors) -> dict[str, Any]:
    """Return the config in Hugging Face's terms; `ModelError` if the architecture is not supported."""
    path = metadata.origin
    kind = metadata.text("general.type", "model")
    if kind != "model":
        raise ModelError(f"{path} holds a {kind}, not a whole model", field="model")
    if metadata.values.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"{path} is one part of a split GGUF file",
            field="model",
            hint="join the parts with llama-gguf-split --merge",
        )
    name = metadata.text("general.architecture", "")
    if name not in _ARCHITECTURES:
        raise ModelError(
            f"{path}: architecture {name!r} is not supported",
            field="model",
            hint=f"supported in GGUF are {', '.join(sorted(_ARCHITECTURES))}",
        )
    architecture, model_type, specific = _ARCHITECTURES[name]
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in metadata.values.items() if key.startswith(prefix)}
    shape = ModelConfig(own, prefix, metadata.origin)
    config = _common(shape, tensors) | {"architectures": [architecture], "model_type": model_type}
    for kind in ("bos", "eos"):
        config[f"{kind}_token_id"] = token_id(metadata, f"tokenizer.ggml.{kind}_token_id")
    return config | specific(shape, tensors)


def _number(shape: ModelConfig, key: str, default: float | None = None) -> float:
    """Return a positive number, which files hold as a float32, in its shortest decimal form."""
    return float(str(np.float32(shape.number(key, default))))


def _optional_number(shape: ModelConfig, key: str) -> float | None:
    """Return a positive number, or None if it is absent or 0."""
    return _number(shape, key) if shape.values.get(key) else None


def _common(shape: ModelConfig, tensors: Tensors) -> dict[str, Any]:
    heads = shape.count("attention.head_count")
    hidden = shape.count("embedding_length")
    head_dim = shape.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        found = shape.count(key, head_dim)
        if found != head_dim:
            raise ModelError(
                f"{shape.origin}: {shape.prefix}{key} is {found} and the head size {head_dim}; "
                "only equal values are supported",
                field="model",
            )
    layers = shape.count("block_count")
    if layers > len(tensors):
        raise ModelError(
            f"{shape.origin}: {shape.prefix}block_count is {layers}, but there are {len(tensors)} tensors",
            field="model",
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{shape.origin} has no usable tensor 'token_embd.weight'", field="model")
    return {
        "hidden_size": hidden,
        "intermediate_size": shape.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": shape.count("context_length"),
        "rms_norm_eps": _number(shape, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(shape, "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(shape, tensors, head_dim),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _rope_scaling(shape: ModelConfig, tensors: Tensors, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in tensors:
        return _llama3_scaling(shape, tensors, head_dim)
    kind = shape.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{shape.origin}: rope scaling {kind!r} is not supported", field="model")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _number(shape, "rope.scaling.factor")}
    original = shape.index("rope.scaling.original_context_length", 0)
    if kind == "yarn" and original:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(shape: ModelConfig, tensors: Tensors, head_dim: int) -> dict[str, Any]:
    """Recover Llama 3's scaling parameters from the factors that the converter computed from them."""
    tensor = tensors["rope_freqs.weight"]
    if tensor.dtype != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{shape.origin}: tensor 'rope_freqs.weight' has no usable form", field="model")
    factors = tensor.view("<f4")
    factor = float(factors.max())
    expected = _llama3_factors(_number(shape, "rope.freq_base", 10000.0), head_dim, factor)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(
            f"{shape.origin}: the rope factors in 'rope_freqs.weight' are not those of Llama 3", field="model"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return by how much Llama 3 divides each rope frequency (low 1, high 4, original context 8192)."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _llama(shape: ModelConfig, tensors: Tensors) -> dict[str, Any]:
    if shape.index("expert_count", 0):
        raise ModelError(f"{shape.origin}: Mixtral-style experts are not supported", field="model")
    return {"mlp_bias": False}


def _qwen(shape: ModelConfig, tensors: Tensors) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3_moe(shape: ModelConfig, tensors: Tensors) -> dict[str, Any]:
    return {
        "use_sliding_window": False,
        "num_experts": shape.count("expert_count"),
        "num_experts_per_tok": shape.count("expert_used_count"),
        "moe_intermediate_size": shape.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma3(shape: ModelConfig, tensors: Tensors) -> dict[str, Any]:
    layers = shape.count("block_count")
    heads = shape.count("attention.head_count")
    hidden = shape.count("embedding_length")
    # The 27B model, known by its 62 layers, scales queries by hidden size / heads, the others by the head size.
    scalar = hidden // heads if layers == 62 else shape.count("attention.key_length", hidden // heads)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": shape.count("attention.sliding_window"),
        "layer_types": ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(layers)],
        "rope_local_base_freq": _number(shape, "rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": _optional_number(shape, "final_logit_softcapping"),
        "attn_logit_softcapping": _optional_number(shape, "attn_logit_softcapping"),
    }


def _ernie(shape: ModelConfig, tensors: Tensors) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in tensors}


def _ernie_moe(shape: ModelConfig, tensors: Tensors) -> dict[str, Any]:
    return _ernie(shape, tensors) | {
        "moe_num_experts": shape.count("expert_count"),
        "moe_k": shape.count("expert_used_count"),
        "moe_intermediate_size": shape.count("expert_feed_forward_length"),
        "moe_num_shared_experts": shape.index("expert_shared_count", 0),
        "moe_layer_start_index": shape.index("leading_dense_block_count", 0),
        "moe_layer_end_index": shape.count("block_count") - 1,
        "moe_layer_interval": shape.count("interleave_moe_layer_step", 1),
    }


_ARCHITECTURES: Mapping[str, tuple[str, str, Callable[[ModelConfig, Tensors], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "llama", _llama),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _qwen),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _qwen),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5", _ernie),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _ernie_moe),
}
"""GGUF's name -> Hugging Face's architecture and model type, and what is particular about the config."""
