"""GLM-4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import Traits, head_dim_of, rope_spec
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
