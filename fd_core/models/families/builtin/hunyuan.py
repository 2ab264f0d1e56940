"""Hunyuan."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fd_core.errors import ModelError
from fd_core.models.families.contract import Family
from fd_core.models.families.spec import MoeSpec, NormSpec, Traits, VectorSpec, gate_up_down, head_dim_of, rope_spec
from fd_core.models.loading.config import ModelConfig


class HunyuanDense(Family):
    """`HunYuanDenseV1ForCausalLM`: norms on the heads of q and k, after rope."""

    architectures = ("HunYuanDenseV1ForCausalLM",)
    model_type = "hunyuan_v1_dense"
    cases: ClassVar = {
        "alpha": {
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
            "tie_word_embeddings": True,
        },
        "biases": {"attention_bias": True},
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, with biases if the config has them."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        bias = config.flag("attention_bias")
        return Traits(
            rope=lambda layer: rope,
            qkv_bias=bias,
            output_bias=bias,
            head_norms="after rope",
            names={"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"},
        )


class HunyuanMoe(Family):
    """`HunYuanMoEV1ForCausalLM`: Hunyuan with experts and one shared expert in every layer."""

    architectures = ("HunYuanMoEV1ForCausalLM",)
    model_type = "hunyuan_v1_moe"
    cases: ClassVar = {"plain": {"num_experts": 6, "moe_topk": 2, "intermediate_size": 32}}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model. Raises `ModelError` for numbers of experts that differ between layers."""
        for field in ("num_experts", "moe_topk"):
            listed = config.values.get(field)
            if isinstance(listed, list | tuple) and len({*listed}) > 1:
                raise ModelError(f"{config.origin}: {field} differs between layers, which is not supported")
        hidden, intermediate = config.count("hidden_size"), config.count("intermediate_size")
        count, top_k = (config.indices(field)[0] for field in ("num_experts", "moe_topk"))

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec:
            block = f"{prefix}.mlp"
            return MoeSpec(
                norm=norm,
                router=VectorSpec(f"{block}.gate.wg.weight", (count, hidden)),
                experts=tuple(gate_up_down(f"{block}.experts.{index}", hidden, intermediate) for index in range(count)),
                top_k=top_k,
                normalize=True,
                shared=gate_up_down(f"{block}.shared_mlp", hidden, intermediate),
            )

        return replace(HunyuanDense().traits(config), moe=moe)
