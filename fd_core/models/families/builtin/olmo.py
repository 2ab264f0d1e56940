"""OLMo 2, OLMo 3 and OLMoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from fd_core.errors import ModelError
from fd_core.models.families.builtin.gemma import ropes_of_kinds
from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import MoeSpec, NormSpec, Traits, VectorSpec, head_dim_of, rope_spec, separate_experts
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.gguf_family import windows

_THETA = 500_000.0


def _gguf_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    """Return the layers with a window, which OLMo 3 has; both are converted under one name."""
    if shape.optional_count("attention.sliding_window") is None:
        return {}
    theta = {"rope_theta": shape.single("rope.freq_base", 10_000.0)}
    ropes = {"rope_theta": None, "rope_parameters": {"full_attention": theta, "sliding_attention": theta}}
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **windows(shape), **ropes}


def _experts(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return {"num_experts": shape.count("expert_count"), "num_experts_per_tok": shape.count("expert_used_count")}


class Olmo2(Family):
    """`Olmo2ForCausalLM`: norms after each block only, and one norm of all heads of q and one of k."""

    architectures = ("Olmo2ForCausalLM",)
    model_type = "olmo2"
    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    cases: ClassVar = {"plain": {}, "biases": {"attention_bias": True, "tie_word_embeddings": True}}
    gguf: ClassVar = {"olmo2": Gguf(config=_gguf_config)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, with biases if the config has them."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        bias = config.flag("attention_bias")
        return Traits(rope=lambda layer: rope, qkv_bias=bias, output_bias=bias, head_norms="joint", norms="after")


class Olmo3(Family):
    """`Olmo3ForCausalLM`: OLMo 2 with windows; only layers with full attention have scaled rope."""

    architectures = ("Olmo3ForCausalLM",)
    model_type = "olmo3"
    defaults: ClassVar = Olmo2.defaults
    cases: ClassVar = {
        "yarn": {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        "biases": {"attention_bias": True, "sliding_window": 9},
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; by default, every fourth layer has full attention."""
        if config.number("rope_theta", _THETA) != _THETA:
            raise ModelError(f"{config.origin}: rope_theta is not {_THETA:g}; state the bases in rope_parameters")
        full, sliding = ropes_of_kinds(config, _THETA, _THETA)
        count, window = config.count("num_hidden_layers"), config.optional_count("sliding_window", 4096)
        types = config.layer_types(count) or tuple(
            "sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(count)
        )
        bias = config.flag("attention_bias")
        return Traits(
            rope=lambda layer: sliding if types[layer] == "sliding_attention" else full,
            window=lambda layer: window if types[layer] == "sliding_attention" else None,
            qkv_bias=bias,
            output_bias=bias,
            head_norms="joint",
            norms="after",
        )


class Olmoe(Family):
    """`OlmoeForCausalLM`: experts in every layer, whose weights need not sum to 1; norms of all heads of q and of k."""

    architectures = ("OlmoeForCausalLM",)
    model_type = "olmoe"
    defaults: ClassVar = Olmo2.defaults
    cases: ClassVar = {
        "plain": {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "norm_topk_prob": False},
        "normalized": {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    }
    gguf: ClassVar = {"olmoe": Gguf(config=_experts)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model. Raises `ModelError` for clipped queries, keys and values."""
        config.refuse("clip_qkv", "clipped queries, keys and values are not supported")
        hidden, intermediate = config.count("hidden_size"), config.count("intermediate_size")
        count = config.count("num_experts", 64)

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec:
            return MoeSpec(
                norm=norm,
                router=VectorSpec(f"{prefix}.mlp.gate.weight", (count, hidden)),
                experts=separate_experts(f"{prefix}.mlp.experts", count, hidden, intermediate),
                top_k=config.count("num_experts_per_tok", 8),
                normalize=config.flag("norm_topk_prob"),
            )

        return replace(Olmo2().traits(config), norms="before", moe=moe)
