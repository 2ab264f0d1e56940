"""Description of how llama.cpp's converter stores one family of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fd_core.errors import ModelError
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.files import StoredTensor

StoredTensors = Mapping[str, StoredTensor]
"""Tensors of a GGUF file by their name there."""

CONVERTED: Final[Mapping[str, tuple[str, ...]]] = {
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size_mlp", "intermediate_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("layer_norm_epsilon", "rms_norm_eps", "norm_eps"),
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
    "expert_count": ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_topk", "moe_k"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    ),
    "expert_shared_count": ("moe_num_shared_experts", "n_shared_experts"),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("moe_layer_start_index", "first_k_dense_replace"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "use_parallel_residual": ("use_parallel_residual",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim"),
    "ssm.state_size": ("mamba_d_state", "ssm_state_size", "linear_key_head_dim"),
    "ssm.group_count": ("mamba_n_groups", "n_groups", "linear_num_key_heads"),
    "ssm.time_step_rank": ("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"),
}
"""Metadata of an architecture, and the fields of `config.json` that a converter writes there, whichever exists."""
_COMPUTED: Final = {
    "partial_rotary_factor": "rope.dimension_count",
    "qk_nope_head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "mamba_d_head": "ssm.inner_size",
    "mamba_head_dim": "ssm.inner_size",
}
"""Fields that are computed from a key and others."""


def config_keys(architecture: str) -> dict[str, str]:
    """Return the key of GGUF files of an architecture for each field of `config.json` that is read from it."""
    fields = {field: key for key, fields in reversed([*CONVERTED.items()]) for field in fields} | _COMPUTED
    return {field: f"{architecture}.{key}" for field, key in fields.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """Differences from the usual names and values."""

    config: Callable[[ModelConfig, StoredTensors], dict[str, Any]] = lambda shape, tensors: {}
    """Returns the fields of `config.json` that the common metadata do not give, from the architecture's own metadata,
    named without its prefix, and the tensors."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer whose name differs from the usual one: GGUF's name to Hugging Face's, with `{}` for the index
    of an expert."""
    top: Mapping[str, str] = field(default_factory=dict)
    """The same of tensors outside of layers, with whole names."""
    permuted: bool = False
    """True if the rows of q and k were permuted for interleaved rope."""
    tiled: bool = False
    """True if the heads of values of recurrent layers are in turns of one for each head of keys."""
    norm_offset: float = 0.0
    """Number that was added to the norm weights."""
    mtp: Mapping[str, str] | None = None
    """If the family has a layer for multi-token prediction: the beginnings of the names of its tensors that differ from
    those of DeepSeek, without `model.layers.N.`, to whole ones. Its tensors are not read otherwise."""


def windows(shape: ModelConfig, every: int = 4, window: int | None = None) -> dict[str, Any]:
    """Return the window, by default `window`, and the layers that use it.

    The file lists them, or has another number than `every`: every so many layers, the last one does not.
    """
    key = "attention.sliding_window_pattern"
    layers, given = range(shape.count("block_count")), shape.values.get(key, every)
    if isinstance(given, int) and not isinstance(given, bool):
        period = shape.index(key, every)
        given = [not period or (layer + 1) % period > 0 for layer in layers]
    if not isinstance(given, list | tuple) or len(given) != len(layers):
        raise ModelError(f"{shape.origin}: {shape.prefix}{key} must list {len(layers)} layers, or be an integer")
    window = shape.optional_count("attention.sliding_window", window)
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if window and each else "full_attention" for each in given],
    }


def layers_with(shape: ModelConfig, key: str) -> list[bool]:
    """Return whether each layer has a number above 0 of what `key` counts; all have without a list."""
    layers = shape.count("block_count")
    return [each > 0 for each in shape.values.get(f"{key}.layers", [1] * layers)]


KnownGguf = Mapping[str, tuple[str, str, Gguf]]
"""Name in `general.architecture` -> architecture and model type in `config.json`, and how the files are stored."""
