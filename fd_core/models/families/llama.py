"""Llama and the models built like it: SmolLM2, Llama 3, Mistral."""

from __future__ import annotations

from fd_core.models.loading.config import ModelConfig
from fd_core.models.rope import rope_spec
from fd_core.models.spec import Traits, head_dim_of

__all__ = ["llama", "mistral"]


def llama(config: ModelConfig) -> Traits:
    """Describe `LlamaForCausalLM`."""
    rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
    bias = config.flag("attention_bias")
    return Traits(rope=lambda layer: rope, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def mistral(config: ModelConfig) -> Traits:
    """Describe `MistralForCausalLM`: every layer sees a sliding window, if there is one."""
    rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
    window = config.optional_count("sliding_window")
    return Traits(rope=lambda layer: rope, window=lambda layer: window)
