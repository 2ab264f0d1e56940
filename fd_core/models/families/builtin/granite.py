"""Granite."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fd_core.models.families.contract import Family
from fd_core.models.families.spec import LinearSpec, MoeSpec, NormSpec, Traits, VectorSpec, head_dim_of, rope_spec
from fd_core.models.loading.config import ModelConfig


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

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, with biases if the config has them."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
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
    """`GraniteMoeForCausalLM`: every layer has experts, which are stored in one tensor."""

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
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; the weights of a token's experts sum to 1."""
        hidden, intermediate = config.count("hidden_size"), config.count("intermediate_size")
        count = config.count("num_local_experts", 8)

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec:
            block = f"{prefix}.block_sparse_moe"
            return MoeSpec(
                norm=norm,
                router=VectorSpec(f"{block}.router.layer.weight", (count, hidden)),
                experts=tuple(
                    (
                        LinearSpec(
                            (f"{block}.input_linear",), (intermediate, intermediate), hidden, stack=(index, count)
                        ),
                        LinearSpec((f"{block}.output_linear",), (hidden,), intermediate, stack=(index, count)),
                    )
                    for index in range(count)
                ),
                top_k=config.count("num_experts_per_tok", 2),
                normalize=True,
            )

        return replace(Granite().traits(config), moe=moe)
