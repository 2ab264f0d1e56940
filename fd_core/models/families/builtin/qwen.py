"""Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Final

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


def _whole_contexts(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _experts(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return {
        "use_sliding_window": False,
        "num_experts": shape.count("expert_count"),
        "num_experts_per_tok": shape.count("expert_used_count"),
        "moe_intermediate_size": shape.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


SHARED_EXPERT: Final = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{each}_shexp": f"mlp.shared_expert.{each}_proj" for each in ("gate", "up", "down")},
}
"""Tensors of GGUF files for an expert that every token uses."""


def gguf_shared_expert(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    """Return the fields about experts, with one that every token uses, of a GGUF file."""
    return _experts(shape, tensors) | {
        "shared_expert_intermediate_size": shape.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


class Qwen2(Family):
    """`Qwen2ForCausalLM`: biases on q, k and v."""

    architectures = ("Qwen2ForCausalLM",)
    model_type = "qwen2"
    defaults: ClassVar = {"num_key_value_heads": 32}
    cases: ClassVar = {
        "tied": {"tie_word_embeddings": True},
        "window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    }
    gguf: ClassVar = {"qwen2": Gguf(config=_whole_contexts)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; some of its layers may have a window."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        return Traits(rope=lambda layer: rope, window=_window(config), qkv_bias=True)


class Qwen3(Family):
    """`Qwen3ForCausalLM`: no biases, norms on the heads of q and k."""

    architectures = ("Qwen3ForCausalLM",)
    model_type = "qwen3"
    defaults: ClassVar = {"head_dim": 128, "num_key_value_heads": 32}
    cases: ClassVar = {
        "yarn": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "biases": {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    }
    gguf: ClassVar = {"qwen3": Gguf(config=_whole_contexts)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; some of its layers may have a window."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        bias = config.flag("attention_bias")
        return Traits(
            rope=lambda layer: rope, window=_window(config), qkv_bias=bias, output_bias=bias, head_norms="before rope"
        )


class Qwen3Moe(Family):
    """`Qwen3MoeForCausalLM`: as Qwen3, most layers with experts."""

    architectures = ("Qwen3MoeForCausalLM",)
    model_type = "qwen3_moe"
    defaults: ClassVar = {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    cases: ClassVar = {
        "normalized": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        "every-second": {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    }
    gguf: ClassVar = {"qwen3moe": Gguf(config=_experts)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; each of its layers has experts, or is listed or skipped by the config."""
        window = config.optional_count("sliding_window", 4096) if config.flag("use_sliding_window") else None
        return replace(Qwen3().traits(config), window=lambda layer: window, moe=routed_experts(config))


class Qwen2Moe(Family):
    """`Qwen2MoeForCausalLM`: as Qwen3-MoE with the attention of Qwen2, and one shared expert with a gate."""

    architectures = ("Qwen2MoeForCausalLM",)
    model_type = "qwen2_moe"
    defaults: ClassVar = {
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "intermediate_size": 5632,
        "shared_expert_intermediate_size": 5632,
    }
    cases: ClassVar = {
        "plain": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
        },
        "every-second": {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [0],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    }
    gguf: ClassVar = {
        "qwen2moe": Gguf(
            config=gguf_shared_expert,
            tensors=SHARED_EXPERT,
        )
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; each of its layers has experts, or is listed or skipped by the config."""
        count, some = config.count("num_hidden_layers"), config.index("max_window_layers", 28)
        types = config.layer_types(count) or tuple(
            "sliding_attention" if layer < some and layer % 2 == 0 else "full_attention" for layer in range(count)
        )
        window = config.optional_count("sliding_window", 4096) if config.flag("use_sliding_window") else None
        return replace(
            Qwen2().traits(config),
            window=lambda layer: window if types[layer] == "sliding_attention" else None,
            qkv_bias=config.flag("qkv_bias", True),
            moe=gated_experts(config),
        )


def routed_experts(config: ModelConfig) -> Callable[[int, str, NormSpec], MoeSpec | None]:
    """Describe experts that are stored one by one, in layers that the config neither lists nor skips."""
    hidden, intermediate = config.count("hidden_size"), config.count("moe_intermediate_size")
    num_experts = config.optional_count("num_experts") or config.count("num_local_experts")
    every = config.count("decoder_sparse_step", 1)
    dense = config.indices("mlp_only_layers")

    def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec | None:
        if layer in dense or (layer + 1) % every:
            return None
        return MoeSpec(
            norm=norm,
            router=VectorSpec(f"{prefix}.mlp.gate.weight", (num_experts, hidden)),
            experts=separate_experts(f"{prefix}.mlp.experts", num_experts, hidden, intermediate),
            top_k=config.count("num_experts_per_tok"),
            normalize=config.flag("norm_topk_prob"),
        )

    return moe


def gated_experts(config: ModelConfig, *, normalize: bool = False) -> Callable[[int, str, NormSpec], MoeSpec | None]:
    """Describe experts with one shared expert that has a gate; with `normalize`, whatever the config has."""
    hidden, shared = config.count("hidden_size"), config.count("shared_expert_intermediate_size")
    routed = routed_experts(config)

    def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec | None:
        block = routed(layer, prefix, norm)
        return block and replace(
            block,
            shared=gate_up_down(f"{prefix}.mlp.shared_expert", hidden, shared),
            shared_gate=VectorSpec(f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden)),
            normalize=normalize or block.normalize,
        )

    return moe


def _window(config: ModelConfig) -> Callable[[int], int | None]:
    """Return the layers with a sliding window: those listed in the config, or those above `max_window_layers`."""
    window = config.optional_count("sliding_window", 4096) if config.flag("use_sliding_window") else None
    types = config.layer_types(config.count("num_hidden_layers"))
    first = config.index("max_window_layers", 0)

    def of(layer: int) -> int | None:
        slides = layer >= first if types is None else types[layer] == "sliding_attention"
        return window if slides else None

    return of
