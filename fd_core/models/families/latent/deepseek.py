"""DeepSeek V2 and V3."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Final

from fd_core.errors import ModelError
from fd_core.models.families.contract import Family
from fd_core.models.families.spec import (
    LatentTraits,
    MoeSpec,
    NormSpec,
    Traits,
    VectorSpec,
    gate_up_down,
    rope_spec,
    separate_experts,
)
from fd_core.models.loading.config import ModelConfig


def latent_traits(config: ModelConfig, *, interleaved: bool) -> Traits:
    """Describe latent attention. YaRN scales scores by the square of the magnitude for `mscale_all_dim`."""
    key, rotated = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    heads = config.count("num_attention_heads")
    rope = rope_spec(config, rotated, theta=10_000.0, interleaved=interleaved)
    scale, part = (key + rotated) ** -0.5, config.part("rope_scaling") or config.part("rope_parameters")
    if part is not None and part.text("rope_type", part.text("type", "default")) != "default":
        weight = part.optional_number("mscale_all_dim")
        factor = part.number("factor") if weight else 1.0
        if weight and factor > 1.0:
            scale *= (0.1 * weight * math.log(factor) + 1.0) ** 2
    bias = config.flag("attention_bias")
    return Traits(
        rope=lambda layer: rope,
        scale=scale,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        latent=LatentTraits(
            rank=config.count("kv_lora_rank"),
            key=key,
            rotated=rotated,
            value=config.optional_count("v_head_dim") or config.count("hidden_size") // heads,
            query_rank=config.optional_count("q_lora_rank"),
        ),
    )


def _routed(config: ModelConfig, prefix: str, norm: NormSpec, correction: bool) -> MoeSpec:
    """Describe the experts of a layer, with those that every token uses."""
    hidden, inner = config.count("hidden_size"), config.count("moe_intermediate_size")
    count, gate = config.count("n_routed_experts"), f"{prefix}.mlp.gate"
    return MoeSpec(
        norm=norm,
        router=VectorSpec(f"{gate}.weight", (count, hidden)),
        experts=separate_experts(f"{prefix}.mlp.experts", count, hidden, inner),
        top_k=config.count("num_experts_per_tok"),
        normalize=correction and config.flag("norm_topk_prob", True),
        norm_floor=1e-20,
        scoring="sigmoid" if correction else "softmax",
        correction_bias=VectorSpec(f"{gate}.e_score_correction_bias", (count,)) if correction else None,
        shared=gate_up_down(
            f"{prefix}.mlp.shared_experts",
            hidden,
            inner * config.count("n_shared_experts"),
            bias=config.flag("mlp_bias"),
        ),
    )


_SIZES: Final = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_EXPERTS: Final = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_YARN: Final = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


class DeepSeekV2(Family):
    """`DeepseekV2ForCausalLM`: latent attention, experts after the first layers."""

    architectures = ("DeepseekV2ForCausalLM",)
    model_type = "deepseek_v2"
    defaults: ClassVar = {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
    }
    cases: ClassVar = {
        "one-linear": {
            **_SIZES,
            **_EXPERTS,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "mlp_bias": True,
        },
        "yarn": {
            **_SIZES,
            **_EXPERTS,
            "q_lora_rank": 20,
            "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model."""
        config.refuse("norm_topk_prob", "the weights of experts are not normalized")
        method = config.text("topk_method", "greedy")
        if method != "greedy":
            raise ModelError(f"{config.origin}: topk_method {method!r} is not supported")
        dense = config.index("first_k_dense_replace", 0)
        return replace(
            latent_traits(config, interleaved=True),
            moe=lambda layer, prefix, norm: None if layer < dense else _routed(config, prefix, norm, correction=False),
        )


class DeepSeekV3(Family):
    """`DeepseekV3ForCausalLM`, also R1 and Kimi K2: experts are scored by a sigmoid with a correction."""

    architectures = ("DeepseekV3ForCausalLM",)
    model_type = "deepseek_v3"
    defaults: ClassVar = {
        **DeepSeekV2.defaults,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "rope_interleave": True,
    }
    cases: ClassVar = {
        "dense": {**_SIZES, "q_lora_rank": 20, "rope_interleave": False, "attention_bias": True},
        "experts": {
            **_SIZES,
            **_EXPERTS,
            "q_lora_rank": 20,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, without the layers that predict further tokens."""
        dense, layers = config.index("first_k_dense_replace", 0), config.count("num_hidden_layers")
        if dense < layers and (config.count("n_group", 8) > 1 or config.number("routed_scaling_factor", 2.5) != 1):
            raise ModelError(f"{config.origin}: groups of experts and factors on their weights are not supported")
        return replace(
            latent_traits(config, interleaved=config.flag("rope_interleave", True)),
            moe=lambda layer, prefix, norm: None if layer < dense else _routed(config, prefix, norm, correction=True),
            ignored=(rf"^model\.layers\.{layers}\.",),
        )
