"""Mixtral."""

from __future__ import annotations

from typing import ClassVar

from fd_core.models.families.contract import Family
from fd_core.models.families.spec import MoeSpec, NormSpec, Traits, VectorSpec, head_dim_of, rope_spec, separate_experts
from fd_core.models.loading.config import ModelConfig


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
        """Describe a model; the weights of a token's experts sum to 1."""
        hidden, intermediate = config.count("hidden_size"), config.count("intermediate_size")
        count = config.count("num_local_experts", 8)

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec:
            block = f"{prefix}.block_sparse_moe"
            return MoeSpec(
                norm=norm,
                router=VectorSpec(f"{block}.gate.weight", (count, hidden)),
                experts=separate_experts(f"{block}.experts", count, hidden, intermediate, names=("w1", "w3", "w2")),
                top_k=config.count("num_experts_per_tok", 2),
                normalize=True,
            )

        rope = rope_spec(config, head_dim_of(config), theta=1_000_000.0)
        window = config.optional_count("sliding_window")
        return Traits(rope=lambda layer: rope, window=lambda layer: window, moe=moe)
