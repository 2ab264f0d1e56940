"""Llama, and decoders that differ from it by little."""

from __future__ import annotations

from typing import Any, ClassVar

from fd_core.errors import ModelError
from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import Traits, head_dim_of, rope_spec
from fd_core.models.loading.config import ModelConfig

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _llama_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    if shape.index("expert_count", 0):
        raise ModelError(f"{shape.origin}: Mixtral-style experts are not supported")
    return {"mlp_bias": False}


class Llama(Family):
    """`LlamaForCausalLM`."""

    architectures = ("LlamaForCausalLM",)
    model_type = "llama"
    cases: ClassVar = {
        "plain": {},
        "biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
        "llama3-rope": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
        "linear-rope": {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "num_key_value_heads": 4,
        },
    }
    gguf: ClassVar = {"llama": Gguf(config=_llama_config, permuted=True)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, with biases if the config has them."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        bias = config.flag("attention_bias")
        return Traits(rope=lambda layer: rope, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


class Mistral(Family):
    """`MistralForCausalLM`: every layer uses the sliding window, if there is one."""

    architectures = ("MistralForCausalLM",)
    model_type = "mistral"
    cases: ClassVar = {"window": {"sliding_window": 7}, "none": {"sliding_window": None}}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model without biases."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        window = config.optional_count("sliding_window")
        return Traits(rope=lambda layer: rope, window=lambda layer: window)
