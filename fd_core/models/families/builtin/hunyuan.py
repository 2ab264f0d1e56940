"""Hunyuan."""

from __future__ import annotations

from dataclasses import replace
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

_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


def _experts(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return {"num_experts": shape.count("expert_count"), "moe_topk": shape.count("expert_used_count")}


class HunyuanDense(Family):
    """`HunYuanDenseV1ForCausalLM`: norms on the heads of q and k, after rope."""

    architectures = ("HunYuanDenseV1ForCausalLM",)
    model_type = "hunyuan_v1_dense"
    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    cases: ClassVar = {
        "alpha": {
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
            "tie_word_embeddings": True,
        },
        "biases": {"attention_bias": True},
    }
    gguf: ClassVar = {"hunyuan-dense": Gguf(tensors=_NORMS)}

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
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "moe_topk": 1}
    cases: ClassVar = {
        "plain": {"num_experts": 6, "moe_topk": 2, "intermediate_size": 32},
        "biases": {"num_experts": 4, "moe_topk": 3, "intermediate_size": 32, "attention_bias": True},
    }
    gguf: ClassVar = {
        "hunyuan-moe": Gguf(
            config=_experts,
            tensors={
                **_NORMS,
                "ffn_gate_inp": "mlp.gate.wg",
                "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
                "ffn_up_shexp": "mlp.shared_mlp.up_proj",
                "ffn_down_shexp": "mlp.shared_mlp.down_proj",
            },
        )
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model. Raises `ModelError` for numbers of experts that differ between layers."""
        hidden, intermediate = config.count("hidden_size"), config.count("intermediate_size")
        count, top_k = (_of_all_layers(config, field) for field in ("num_experts", "moe_topk"))

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec:
            block = f"{prefix}.mlp"
            return MoeSpec(
                norm=norm,
                router=VectorSpec(f"{block}.gate.wg.weight", (count, hidden)),
                experts=separate_experts(f"{block}.experts", count, hidden, intermediate),
                top_k=top_k,
                normalize=True,
                shared=gate_up_down(f"{block}.shared_mlp", hidden, intermediate),
            )

        return replace(HunyuanDense().traits(config), moe=moe)


def _of_all_layers(config: ModelConfig, field: str) -> int:
    """Return a positive integer, or that which a list has for every layer."""
    listed = config.values.get(field)
    if not isinstance(listed, list | tuple):
        return config.count(field)
    found = {*config.indices(field)}
    if len(found) != 1 or 0 in found:
        raise ModelError(f"{config.origin}: {field} differs between layers, which is not supported")
    return found.pop()
