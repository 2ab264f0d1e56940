"""DeepSeek V2 and V3, and GLM-4.7-Flash."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar, Final

from fd_core.errors import ModelError
from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import (
    LatentTraits,
    MoeSpec,
    MtpSpec,
    NormSpec,
    Traits,
    VectorSpec,
    gate_up_down,
    mtp_spec,
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


def latent_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    """Return the sizes of latent attention in a GGUF file: newer ones have those of heads under names with `_mla`."""
    rotated, heads = shape.count("rope.dimension_count"), shape.count("attention.head_count")
    width = shape.count("attention.key_length_mla", shape.count("attention.key_length"))
    value = shape.count("attention.value_length", shape.count("embedding_length") // heads)
    return {
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": shape.optional_count("attention.q_lora_rank"),
        "kv_lora_rank": shape.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": width - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": shape.count("attention.value_length_mla", value),
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in tensors,
    }


def _gguf_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    corrected = any(".exp_probs_b" in name for name in tensors)  # which files without the function have as well
    kind = shape.index("expert_gating_func", 0) or (_SIGMOID if corrected else _SOFTMAX)
    if kind not in (_SOFTMAX, _SIGMOID):
        raise ModelError(f"{shape.origin}: {shape.prefix}expert_gating_func is {kind}; supported are 1 and 2")
    shape.refuse("attention.temperature_scale", "queries scaled by position are not supported with latent attention")
    number, groups = "3" if kind == _SIGMOID else "2", shape.count("expert_group_count", 1)
    experts = {
        "n_routed_experts": shape.count("expert_count"),
        "num_experts_per_tok": shape.count("expert_used_count"),
        "moe_intermediate_size": shape.count("expert_feed_forward_length"),
        "n_shared_experts": shape.count("expert_shared_count"),
        "routed_scaling_factor": shape.single("expert_weights_scale", 1.0),
        "norm_topk_prob": shape.flag("expert_weights_norm"),
        "n_group": groups,
        "topk_group": shape.count("expert_group_used_count", groups),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }
    return latent_config(shape, tensors) | {
        "architectures": [f"DeepseekV{number}ForCausalLM"],
        "model_type": f"deepseek_v{number}",
        "first_k_dense_replace": shape.index("leading_dense_block_count", 0),
        **(experts if "expert_count" in shape.values else {}),
    }


_SOFTMAX: Final = 1
_SIGMOID: Final = 2
_GGUF: Final = {"deepseek2": Gguf(config=_gguf_config, mtp={})}
"""One architecture for all versions, which differ in the gating function."""


def _routed(config: ModelConfig, prefix: str, norm: NormSpec, *, correction: bool, groups: bool = True) -> MoeSpec:
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
        groups=config.count("n_group") if groups else 1,
        top_groups=config.count("topk_group") if groups else 1,
        weight_scale=config.number("routed_scaling_factor"),
        correction_bias=VectorSpec(f"{gate}.e_score_correction_bias", (count,)) if correction else None,
        shared=gate_up_down(
            f"{prefix}.mlp.shared_experts",
            hidden,
            inner * config.count("n_shared_experts"),
            bias=config.flag("mlp_bias"),
        ),
    )


def mtp_layer(config: ModelConfig, traits: Traits) -> MtpSpec:
    """Describe the layer after the others of DeepSeek-V3 and GLM, which shares embedding and output projection."""
    layers = config.count("num_hidden_layers")
    enorm, hnorm, linear, norm = (
        f"model.layers.{layers}.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    )
    return mtp_spec(config, traits, layers, (enorm, hnorm, linear, norm))


_DEFAULTS: Final = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
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
        **_DEFAULTS,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    }
    cases: ClassVar = {
        "one-linear": {
            **_SIZES,
            **_EXPERTS,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "mlp_bias": True,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
        "yarn": {
            **_SIZES,
            **_EXPERTS,
            "q_lora_rank": 20,
            "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    }

    gguf: ClassVar = _GGUF

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model."""
        config.refuse("norm_topk_prob", "the weights of experts are not normalized")
        method, dense = config.text("topk_method", "greedy"), config.index("first_k_dense_replace", 0)
        if method not in ("greedy", "group_limited_greedy"):
            raise ModelError(f"{config.origin}: topk_method {method!r} is not supported")

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec | None:
            return None if layer < dense else _routed(config, prefix, norm, correction=False, groups=method != "greedy")

        return replace(latent_traits(config, interleaved=True), moe=moe)


class DeepSeekV3(Family):
    """`DeepseekV3ForCausalLM`, also R1 and Kimi K2: experts are scored by a sigmoid with a correction."""

    architectures = ("DeepseekV3ForCausalLM",)
    model_type = "deepseek_v3"
    defaults: ClassVar = {
        **_DEFAULTS,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
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
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    }

    gguf: ClassVar = _GGUF

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, without the layers that predict further tokens."""
        layers = config.count("num_hidden_layers")
        dense = self.dense_layers(config, layers)
        return replace(
            latent_traits(config, interleaved=config.flag("rope_interleave", True)),
            moe=lambda layer, prefix, norm: None if layer in dense else _routed(config, prefix, norm, correction=True),
            ignored=(rf"^model\.layers\.{layers}\.",),
        )

    def mtp(self, config: ModelConfig) -> MtpSpec:
        """Describe the layer after the others."""
        return mtp_layer(config, self.traits(config))

    def dense_layers(self, config: ModelConfig, layers: int) -> Collection[int]:
        """Return the layers without experts."""
        return range(min(config.index("first_k_dense_replace", 0), layers))


class Glm4MoeLite(DeepSeekV3):
    """`Glm4MoeLiteForCausalLM`, GLM-4.7-Flash: as DeepSeek-V3, with a list of the layers that have experts."""

    architectures = ("Glm4MoeLiteForCausalLM",)
    model_type = "glm4_moe_lite"
    defaults: ClassVar = {
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
    }
    cases: ClassVar = {
        "sparse": {
            **DeepSeekV3.cases["experts"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_interleave": False,
            "attention_bias": True,
        },
        "usual": {**_SIZES, **_EXPERTS, "q_lora_rank": 20},
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; `head_dim` is another name of its `qk_rope_head_dim`."""
        rotated = {"qk_rope_head_dim": config.values.get("head_dim", 64)}
        return super().traits(replace(config, values={**rotated, **config.values}))

    def dense_layers(self, config: ModelConfig, layers: int) -> Collection[int]:
        """Return the layers without experts, by default the first one."""
        kinds = config.strings("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
        if len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
            raise ModelError(f"{config.origin}: mlp_layer_types must be dense or sparse for each of {layers} layers")
        return {layer for layer, kind in enumerate(kinds) if kind == "dense"}
