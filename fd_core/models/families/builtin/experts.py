"""Mixtral, MiniMax-M2 and gpt-oss: experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from fd_core.errors import ModelError
from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import (
    MoeSpec,
    NormSpec,
    Traits,
    VectorSpec,
    gate_up_down,
    head_dim_of,
    rope_spec,
    separate_experts,
)
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.gguf_family import windows
from fd_core.ops.contract import CLAMP

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _moe(config: ModelConfig, layer: int, prefix: str, norm: NormSpec) -> MoeSpec:
    """Return the experts of a layer; the weights of a token's experts sum to 1."""
    hidden, count = config.count("hidden_size"), config.count("num_local_experts", 8)
    block = f"{prefix}.block_sparse_moe"
    return MoeSpec(
        norm=norm,
        router=VectorSpec(f"{block}.gate.weight", (count, hidden)),
        experts=separate_experts(
            f"{block}.experts", count, hidden, config.count("intermediate_size"), names=("w1", "w3", "w2")
        ),
        top_k=config.count("num_experts_per_tok", 2),
        normalize=True,
    )


class Mixtral(Family):
    """`MixtralForCausalLM`: experts in every layer, which uses the sliding window, if there is one."""

    architectures = ("MixtralForCausalLM",)
    model_type = "mixtral"
    defaults: ClassVar = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    cases: ClassVar = {
        "plain": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32},
        "window": {"num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 32, "sliding_window": 7},
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model."""
        rope = rope_spec(config, head_dim_of(config), theta=1_000_000.0)
        window = config.optional_count("sliding_window")
        return Traits(rope=lambda layer: rope, window=lambda layer: window, moe=partial(_moe, config))


def _minimax_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return {"num_local_experts": shape.count("expert_count"), "num_experts_per_tok": shape.count("expert_used_count")}


class MiniMaxM2(Family):
    """`MiniMaxM2ForCausalLM`: corrected sigmoid scores; all query heads have one norm, and all key heads."""

    architectures = ("MiniMaxM2ForCausalLM",)
    model_type = "minimax_m2"
    defaults: ClassVar = {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 1536,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    }
    cases: ClassVar = {
        "plain": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "rotary_dim": 12}
    }
    gguf: ClassVar = {
        "minimax-m2": Gguf(
            config=_minimax_config,
            tensors={
                "ffn_gate_inp": "block_sparse_moe.gate",
                "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
                "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
                "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
                "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            },
        )
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; published configs have the rotated elements of a head in `rotary_dim`."""
        width = head_dim_of(config)

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec:
            block = _moe(config, layer, prefix, norm)
            bias = VectorSpec(f"{prefix}.block_sparse_moe.e_score_correction_bias", (len(block.experts),))
            return replace(block, scoring="sigmoid", correction_bias=bias)

        share = config.count("rotary_dim", width) / width
        rope = rope_spec(config, width, theta=5_000_000.0, rotary=share)
        return Traits(rope=lambda layer: rope, moe=moe, head_norms="joint")


def _gpt_oss_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    """Return the fields that the common metadata do not give."""
    config = {
        **windows(shape, every=2, window=shape.count("attention.sliding_window")),
        "num_local_experts": shape.count("expert_count"),
        "num_experts_per_tok": shape.count("expert_used_count"),
        "intermediate_size": shape.count("expert_feed_forward_length", shape.count("feed_forward_length")),
        "separate_experts": True,
        "rope_parameters": {},
    }
    if shape.text("rope.scaling.type", "none") == "yarn":  # llama.cpp does not store whether frequencies are truncated
        context = shape.count("rope.scaling.original_context_length")
        scaling = {"factor": shape.single("rope.scaling.factor"), "original_max_position_embeddings": context}
        config["rope_scaling"] = _GPT_OSS_ROPE | {"rope_theta": shape.single("rope.freq_base")} | scaling
    return config


class GptOss(Family):
    """`GptOssForCausalLM`: attention sinks, every second layer with a window, experts with biases."""

    architectures = ("GptOssForCausalLM",)
    model_type = "gpt_oss"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _GPT_OSS_ROPE,
    }
    cases: ClassVar = {
        "plain": {
            "sliding_window": 7,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "head_dim": 16,
            "rope_parameters": {**_GPT_OSS_ROPE, "original_max_position_embeddings": 32},
        },
        "listed": {
            "sliding_window": 9,
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
        },
    }

    gguf: ClassVar = {"gpt-oss": Gguf(config=_gpt_oss_config, tensors={"ffn_gate_inp": "mlp.router"})}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; a softmax over the chosen experts has their share of a softmax over all."""
        for field, usual in (("swiglu_limit", CLAMP), ("swiglu_alpha", 1.702)):
            if (found := config.number(field, usual)) != usual:
                raise ModelError(f"{config.origin}: {field}={found:g} is set, but only {usual:g} is supported")
        hidden, inner = config.count("hidden_size"), config.count("intermediate_size", 2880)
        count = config.count("num_local_experts", 128)

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec:
            block = f"{prefix}.mlp"
            names, how = ("gate_up_proj", "down_proj"), {"transposed": True, "alternating": True}
            stacked = partial(gate_up_down, f"{block}.experts", hidden, inner, bias=True, names=names, **how)
            experts = tuple(stacked(stack=(index, count)) for index in range(count))
            if separate:
                experts = separate_experts(f"{block}.experts", count, hidden, inner, bias=True)
            return MoeSpec(
                norm=norm,
                router=VectorSpec(f"{block}.router.weight", (count, hidden)),
                router_bias=VectorSpec(f"{block}.router.bias", (count,)),
                experts=experts,
                top_k=config.count("num_experts_per_tok", 4),
                normalize=True,
            )

        quantized = config.part("quantization_config")
        separate = config.flag("separate_experts") or (quantized and quantized.text("quant_method", "") == "mxfp4")
        layers = config.count("num_hidden_layers")
        types = config.layer_types(layers) or ("sliding_attention", "full_attention") * layers
        rope = rope_spec(config, head_dim_of(config), theta=150_000.0)
        window, bias = config.count("sliding_window", 128), config.flag("attention_bias", True)
        return Traits(
            rope=lambda layer: rope,
            window=lambda layer: window if types[layer] == "sliding_attention" else None,
            sinks=True,
            moe=moe,
            activation="clamped_swiglu",
            qkv_bias=bias,
            output_bias=bias,
        )
