"""GLM-4 and GLM-4.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.latent.deepseek import mtp_layer
from fd_core.models.families.spec import (
    MoeSpec,
    MtpSpec,
    NormSpec,
    Traits,
    VectorSpec,
    gate_up_down,
    head_dim_of,
    rope_spec,
    separate_experts,
)
from fd_core.models.loading.config import ModelConfig


def _chatglm_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    """Return which form q, k and v have: those of the authors' checkpoints are one linear."""
    fused = "blk.0.attn_qkv.weight" in tensors
    return {"fused_qkv": fused, "attention_bias": f"blk.0.attn_{'qkv' if fused else 'q'}.bias" in tensors}


class Glm(Family):
    """`GlmForCausalLM`, GLM-4-9B: adjacent elements of half of each head are rotated; gate and up are one linear."""

    architectures = ("GlmForCausalLM",)
    model_type = "glm"
    defaults: ClassVar = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}
    cases: ClassVar = {"biases": {"attention_bias": True}, "plain": {"attention_bias": False}}
    gguf: ClassVar = {"chatglm": Gguf(config=_chatglm_config, tensors={"ffn_up": "mlp.gate_up_proj"})}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model with biases on q, k and v, unless the config has none."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0, interleaved=True, rotary=0.5)
        return Traits(
            rope=lambda layer: rope,
            qkv_bias=config.flag("attention_bias", True),
            fused={"gate_up": "mlp.gate_up_proj"} | ({"qkv": "self_attn.qkv_proj"} if config.flag("fused_qkv") else {}),
        )


class Glm4(Family):
    """`Glm4ForCausalLM`, GLM-4-0414: as GLM-4-9B, with norms before and after each block."""

    architectures = ("Glm4ForCausalLM",)
    model_type = "glm4"
    defaults: ClassVar = Glm.defaults
    cases: ClassVar = {"biases": {"attention_bias": True}, "plain": {"attention_bias": False}}
    gguf: ClassVar = {
        "glm4": Gguf(
            tensors={
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_up": "mlp.gate_up_proj",
            }
        )
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model with biases on q, k and v, unless the config has none."""
        names = {
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        }
        return replace(Glm().traits(config), norms="around", names=names)


def _glm4_moe_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "first_k_dense_replace": shape.index("leading_dense_block_count", 0),
        "n_routed_experts": shape.count("expert_count"),
        "n_shared_experts": shape.count("expert_shared_count"),
        "num_experts_per_tok": shape.count("expert_used_count"),
        "moe_intermediate_size": shape.count("expert_feed_forward_length"),
        "n_group": shape.count("expert_group_count", 1),
        "topk_group": shape.count("expert_group_used_count", 1),
        "norm_topk_prob": shape.flag("expert_weights_norm"),
        "routed_scaling_factor": shape.single("expert_weights_scale", 1.0),
    }


class Glm4Moe(Family):
    """`Glm4MoeForCausalLM`, GLM-4.5: experts of the best groups by corrected sigmoid scores; half a head is rotated."""

    architectures = ("Glm4MoeForCausalLM",)
    model_type = "glm4_moe"
    defaults: ClassVar = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    cases: ClassVar = {
        "groups": {
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
        "biases": {
            "attention_bias": True,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
    }
    gguf: ClassVar = {"glm4moe": Gguf(config=_glm4_moe_config, mtp={})}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, without the layer for multi-token prediction after the others."""
        hidden, intermediate = config.count("hidden_size"), config.count("moe_intermediate_size", 1408)
        count, shared = config.count("n_routed_experts", 128), config.count("n_shared_experts", 1)
        first = config.index("first_k_dense_replace", 1)

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec | None:
            if layer < first:
                return None
            block = f"{prefix}.mlp"
            return MoeSpec(
                norm=norm,
                router=VectorSpec(f"{block}.gate.weight", (count, hidden)),
                experts=separate_experts(f"{block}.experts", count, hidden, intermediate),
                top_k=config.count("num_experts_per_tok", 8),
                normalize=config.flag("norm_topk_prob", True),
                norm_floor=1e-20,
                scoring="sigmoid",
                correction_bias=VectorSpec(f"{block}.gate.e_score_correction_bias", (count,)),
                shared=gate_up_down(f"{block}.shared_experts", hidden, shared * intermediate),
                groups=config.count("n_group", 1),
                top_groups=config.count("topk_group", 1),
                weight_scale=config.number("routed_scaling_factor", 1.0),
            )

        rope = rope_spec(config, head_dim_of(config), theta=10_000.0, rotary=0.5)
        return Traits(
            rope=lambda layer: rope,
            moe=moe,
            qkv_bias=config.flag("attention_bias"),
            head_norms="before rope" if config.flag("use_qk_norm") else "",
            ignored=(rf"^model\.layers\.{config.count('num_hidden_layers')}\.",),
        )

    def mtp(self, config: ModelConfig) -> MtpSpec:
        """Describe the layer after the others."""
        return mtp_layer(config, self.traits(config))
