"""Gemma 3, the text models."""

from __future__ import annotations

import math

from fd_core.errors import ModelError
from fd_core.models.loading.config import ModelConfig
from fd_core.models.rope import RopeSpec, scaled_rope_spec
from fd_core.models.spec import Traits, head_dim_of

__all__ = ["gemma3"]

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6
"""One layer in six sees everything, where the config does not list them."""


def gemma3(config: ModelConfig) -> Traits:
    """Describe `Gemma3ForCausalLM`: sliding layers with a rope of their own, norms before and after each block."""
    config.refuse("use_bidirectional_attention", "a decoder sees only earlier tokens")
    num_layers = config.count("num_hidden_layers")
    types = config.layer_types(num_layers) or _default_types(config, num_layers)
    full, sliding = _ropes(config)
    window = config.count("sliding_window")
    bias = config.flag("attention_bias")
    return Traits(
        rope=lambda layer: sliding if types[layer] == "sliding_attention" else full,
        window=lambda layer: window if types[layer] == "sliding_attention" else None,
        scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        head_norms=True,
        sandwich_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(config.count("hidden_size")),
        tied=True,
        activation="hidden_activation",
        attention_softcap=config.optional_number("attn_logit_softcapping"),
        softcap=config.optional_number("final_logit_softcapping"),
    )


def _default_types(config: ModelConfig, num_layers: int) -> tuple[str, ...]:
    pattern = config.count("sliding_window_pattern", _PATTERN)
    return tuple("sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers))


def _ropes(config: ModelConfig) -> tuple[RopeSpec, RopeSpec]:
    """Return the ropes of layers that see everything and of sliding layers, from either form of the config."""
    head_dim = head_dim_of(config)
    parameters = config.part("rope_parameters")
    if parameters is None:
        scaling = config.part("rope_scaling")
        theta = config.number("rope_theta", _GLOBAL_THETA)
        local_theta = config.number("rope_local_base_freq", _LOCAL_THETA)
        return (
            scaled_rope_spec(config, scaling, head_dim, theta=theta),
            scaled_rope_spec(config, None, head_dim, theta=local_theta),
        )
    if "rope_theta" in parameters.values:
        raise ModelError(
            f"{config.origin}: rope_parameters must name full_attention and sliding_attention", field="model"
        )
    return (
        scaled_rope_spec(config, parameters.part("full_attention"), head_dim, theta=_GLOBAL_THETA),
        scaled_rope_spec(config, parameters.part("sliding_attention"), head_dim, theta=_LOCAL_THETA),
    )
