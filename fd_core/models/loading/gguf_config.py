"""A Hugging Face config built from GGUF metadata.

Values that a GGUF file leaves out are those that llama.cpp fixes for the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fd_core.errors import ModelError
from fd_core.models.loading.gguf_format import GgufFile

__all__ = ["GgufMetadata", "config_from"]

_MAX_COUNT = 1 << 32


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Typed access to the metadata; a value of the wrong kind is a `ModelError` that names its key."""

    path: Path
    values: Mapping[str, Any]

    @property
    def arch(self) -> str:
        """The architecture's GGUF name, which prefixes its keys."""
        return self.text("general.architecture") or ""

    def text(self, key: str) -> str | None:
        """Return a string, or None if the key is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def strings(self, key: str) -> list[str]:
        """Return a list of strings, empty if the key is absent."""
        return self._list(key, str)

    def integers(self, key: str) -> list[int]:
        """Return a list of integers, empty if the key is absent."""
        return self._list(key, int)

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value[:1]):
            raise self._wrong(key, f"a list of {kind.__name__}", value)
        return value

    def token_id(self, key: str) -> int | None:
        """Return a token id, or None if the key is absent or says that there is none."""
        value = self.values.get(key)
        if value is None or value == 0xFFFFFFFF:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(key, "a token id", value)
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer of the architecture; `key` comes without the architecture's prefix."""
        value = self.values.get(f"{self.arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_COUNT:
            raise self._wrong(f"{self.arch}.{key}", "one positive integer", value)
        return value

    def optional_count(self, key: str) -> int | None:
        """Return an integer of the architecture, or None if it is absent or 0."""
        return self.count(key) if self.values.get(f"{self.arch}.{key}") else None

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite, positive number of the architecture, written in its shortest decimal form."""
        value = self.values.get(f"{self.arch}.{key}", default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self._wrong(f"{self.arch}.{key}", "a positive number", value)
        return float(str(np.float32(value)))

    def optional_number(self, key: str) -> float | None:
        """Return a number of the architecture, or None if it is absent or 0."""
        return self.number(key) if self.values.get(f"{self.arch}.{key}") else None

    def _wrong(self, key: str, expected: str, value: object) -> ModelError:
        found = "it is missing" if value is None else f"found {str(value)[:60]!r}"
        return ModelError(f"{self.path}: {key} must be {expected}; {found}", field="model")


def config_from(metadata: GgufMetadata, gguf: GgufFile) -> dict[str, Any]:
    """Return the config in Hugging Face's terms; `ModelError` if the architecture is not supported."""
    if metadata.text("general.type") not in (None, "model"):
        raise ModelError(f"{metadata.path} holds a {metadata.text('general.type')}, not a whole model", field="model")
    if metadata.values.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"{metadata.path} is one part of a split GGUF file",
            field="model",
            hint="join the parts with llama-gguf-split --merge",
        )
    specific = _ARCHITECTURES.get(metadata.arch)
    if specific is None:
        raise ModelError(
            f"{metadata.path}: architecture {metadata.arch!r} is not supported",
            field="model",
            hint=f"supported in GGUF are {', '.join(sorted(_ARCHITECTURES))}",
        )
    return _common(metadata, gguf) | specific(metadata, gguf)


def _common(metadata: GgufMetadata, gguf: GgufFile) -> dict[str, Any]:
    heads = metadata.count("attention.head_count")
    hidden = metadata.count("embedding_length")
    head_dim = metadata.count("attention.key_length", hidden // heads)
    _require_equal(metadata, "attention.value_length", head_dim)
    _require_equal(metadata, "rope.dimension_count", head_dim)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{metadata.path} has no usable tensor 'token_embd.weight'", field="model")
    config = {
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, gguf, head_dim),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    for kind in ("bos", "eos"):
        config[f"{kind}_token_id"] = metadata.token_id(f"tokenizer.ggml.{kind}_token_id")
    return config


def _require_equal(metadata: GgufMetadata, key: str, head_dim: int) -> None:
    found = metadata.count(key, head_dim)
    if found != head_dim:
        raise ModelError(
            f"{metadata.path}: {metadata.arch}.{key} is {found} and the head size {head_dim}; "
            "only equal values are supported",
            field="model",
        )


def _rope_scaling(metadata: GgufMetadata, gguf: GgufFile, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_scaling(metadata, gguf, head_dim)
    kind = metadata.text(f"{metadata.arch}.rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{metadata.path}: rope scaling {kind!r} is not supported", field="model")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    original = metadata.optional_count("rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(metadata: GgufMetadata, gguf: GgufFile, head_dim: int) -> dict[str, Any]:
    """Recover Llama 3's scaling parameters from the factors that the converter computed from them."""
    tensor = gguf.tensors["rope_freqs.weight"]
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{metadata.path}: tensor 'rope_freqs.weight' has no usable form", field="model")
    factors = gguf.file.view(tensor.offset, tensor.shape, "<f4", "tensor 'rope_freqs.weight'")
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_factors(metadata.number("rope.freq_base", 10000.0), head_dim, float(factors.max()))
    if not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(
            f"{metadata.path}: the rope factors in 'rope_freqs.weight' are not those of Llama 3", field="model"
        )
    return scaling


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return by how much Llama 3 divides each rope frequency (low 1, high 4, original context 8192)."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _llama(metadata: GgufMetadata, gguf: GgufFile) -> dict[str, Any]:
    if metadata.optional_count("expert_count"):
        raise ModelError(f"{metadata.path}: Mixtral-style experts are not supported", field="model")
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}


def _qwen2(metadata: GgufMetadata, gguf: GgufFile) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}


def _qwen3(metadata: GgufMetadata, gguf: GgufFile) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}


def _qwen3_moe(metadata: GgufMetadata, gguf: GgufFile) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "use_sliding_window": False,
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma3(metadata: GgufMetadata, gguf: GgufFile) -> dict[str, Any]:
    layers = metadata.count("block_count")
    heads = metadata.count("attention.head_count")
    hidden = metadata.count("embedding_length")
    # The 27B model, known by its 62 layers, scales queries by hidden size / heads, the others by the head size.
    scalar = hidden // heads if layers == 62 else metadata.count("attention.key_length", hidden // heads)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(layers)],
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": metadata.optional_number("final_logit_softcapping"),
        "attn_logit_softcapping": metadata.optional_number("attn_logit_softcapping"),
    }


def _ernie(metadata: GgufMetadata, gguf: GgufFile) -> dict[str, Any]:
    return {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "use_bias": "blk.0.attn_q.bias" in gguf.tensors,
    }


def _ernie_moe(metadata: GgufMetadata, gguf: GgufFile) -> dict[str, Any]:
    return {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "use_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "moe_num_experts": metadata.count("expert_count"),
        "moe_k": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "moe_num_shared_experts": metadata.optional_count("expert_shared_count") or 0,
        "moe_layer_start_index": metadata.optional_count("leading_dense_block_count") or 0,
        "moe_layer_end_index": metadata.count("block_count") - 1,
        "moe_layer_interval": metadata.count("interleave_moe_layer_step", 1),
    }


_ARCHITECTURES: Mapping[str, Callable[[GgufMetadata, GgufFile], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma3": _gemma3,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
}
