"""Granite."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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

UNROTATED: Final = {"position_embedding_type": "nope", "partial_rotary_factor": 1.0}
"""Files of models without positions count rotated elements as well, of heads that are as wide as the model divided."""


def gguf_factors(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    """Return the factors of a GGUF file, and whether its model has rope: llama.cpp's switch is named for scaling."""
    width = shape.count("attention.key_length", shape.count("embedding_length") // shape.count("attention.head_count"))
    return {
        "embedding_multiplier": shape.optional_single("embedding_scale"),
        "residual_multiplier": shape.optional_single("residual_scale"),
        "attention_multiplier": shape.optional_single("attention.scale") or width**-0.5,
        "logits_scaling": shape.optional_single("logit_scale"),
        **({"position_embedding_type": "rope"} if shape.flag("rope.scaling.finetuned", True) else UNROTATED),
    }


def _experts(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return gguf_factors(shape, tensors) | {
        "num_local_experts": shape.count("expert_count"),
        "num_experts_per_tok": shape.count("expert_used_count"),
        "separate_experts": True,
    }


class Granite(Family):
    """`GraniteForCausalLM`: Llama with factors on embeddings, scores, additions and logits."""

    architectures = ("GraniteForCausalLM",)
    model_type = "granite"
    cases: ClassVar = {
        "factors": {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
        "biases": {"attention_bias": True, "mlp_bias": True, "logits_scaling": 3.0},
    }
    gguf: ClassVar = {"granite": Gguf(config=gguf_factors, permuted=True)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, with biases if the config has them."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        rope = rope.unrotated if config.text("position_embedding_type", "rope") == "nope" else rope
        bias = config.flag("attention_bias")
        return Traits(
            rope=lambda layer: rope,
            scale=config.number("attention_multiplier", 1.0),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=config.flag("mlp_bias"),
            embedding_scale=config.number("embedding_multiplier", 1.0),
            residual_scale=config.number("residual_multiplier", 1.0),
            head_scale=1.0 / config.number("logits_scaling", 1.0),
        )


class GraniteMoe(Family):
    """`GraniteMoeForCausalLM`: every layer has experts, which are stored in one tensor, except in GGUF files."""

    architectures = ("GraniteMoeForCausalLM",)
    model_type = "granitemoe"
    cases: ClassVar = {
        "factors": {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
        "biases": {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "attention_bias": True,
        },
    }
    gguf: ClassVar = {
        "granitemoe": Gguf(config=_experts, tensors={"ffn_gate_inp": "block_sparse_moe.router.layer"}, permuted=True)
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; the weights of a token's experts sum to 1."""
        hidden, intermediate = config.count("hidden_size"), config.count("intermediate_size")
        count, separate = config.count("num_local_experts", 8), config.flag("separate_experts")

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec:
            block = f"{prefix}.block_sparse_moe"

            if separate:
                experts = separate_experts(f"{prefix}.mlp.experts", count, hidden, intermediate)
            else:
                stacked = partial(gate_up_down, block, hidden, intermediate, names=("input_linear", "output_linear"))
                experts = tuple(stacked(stack=(index, count)) for index in range(count))
            return MoeSpec(
                norm=norm,
                router=VectorSpec(f"{block}.router.layer.weight", (count, hidden)),
                experts=experts,
                top_k=config.count("num_experts_per_tok", 2),
                normalize=True,
            )

        return replace(Granite().traits(config), moe=moe)
