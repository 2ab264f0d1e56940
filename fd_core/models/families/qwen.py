"""Qwen2, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fd_core.models.loading.config import ModelConfig
from fd_core.models.rope import rope_spec
from fd_core.models.spec import MoeSpec, Traits, VectorSpec, gate_up_down, head_dim_of

__all__ = ["qwen2", "qwen3", "qwen3_moe"]


def qwen2(config: ModelConfig) -> Traits:
    """Describe `Qwen2ForCausalLM`: biases on q, k and v."""
    rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
    return Traits(rope=lambda layer: rope, window=_window(config), qkv_bias=True)


def qwen3(config: ModelConfig) -> Traits:
    """Describe `Qwen3ForCausalLM`: no biases, norms on the heads of q and k."""
    bias = config.flag("attention_bias")
    return replace(qwen2(config), qkv_bias=bias, output_bias=bias, head_norms=True)


def qwen3_moe(config: ModelConfig) -> Traits:
    """Describe `Qwen3MoeForCausalLM`: as Qwen3, most layers with experts."""
    hidden, intermediate = config.count("hidden_size"), config.count("moe_intermediate_size")
    num_experts = config.optional_count("num_experts") or config.count("num_local_experts")
    every = config.count("decoder_sparse_step", 1)
    dense = config.indices("mlp_only_layers")
    window = config.optional_count("sliding_window") if config.flag("use_sliding_window") else None

    def moe(layer: int, prefix: str, norm: VectorSpec) -> MoeSpec | None:
        if layer in dense or (layer + 1) % every:
            return None
        return MoeSpec(
            norm=norm,
            router=VectorSpec(f"{prefix}.mlp.gate.weight", (num_experts, hidden)),
            experts=tuple(
                gate_up_down(f"{prefix}.mlp.experts.{expert}", hidden, intermediate) for expert in range(num_experts)
            ),
            top_k=config.count("num_experts_per_tok"),
            normalize=config.flag("norm_topk_prob"),
        )

    return replace(qwen3(config), window=lambda layer: window, moe=moe)


def _window(config: ModelConfig) -> Callable[[int], int | None]:
    """Return which layers slide: those that the config lists, or those above `max_window_layers`."""
    window = config.optional_count("sliding_window") if config.flag("use_sliding_window") else None
    types = config.layer_types(config.count("num_hidden_layers"))
    first = config.index("max_window_layers", 0)

    def of(layer: int) -> int | None:
        slides = layer >= first if types is None else types[layer] == "sliding_attention"
        return window if slides else None

    return of
