"""ERNIE 4.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import (
    MoeSpec,
    MtpSpec,
    NormSpec,
    Traits,
    VectorSpec,
    gate_up_down,
    head_dim_of,
    mtp_spec,
    rope_spec,
    separate_experts,
)
from fd_core.models.loading.config import ModelConfig


def _dense(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in tensors}


def _experts(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return _dense(shape, tensors) | {
        "moe_num_experts": shape.count("expert_count"),
        "moe_k": shape.count("expert_used_count"),
        "moe_intermediate_size": shape.count("expert_feed_forward_length"),
        "moe_num_shared_experts": shape.index("expert_shared_count", 0),
        "moe_layer_start_index": shape.index("leading_dense_block_count", 0),
        "moe_layer_end_index": shape.count("block_count") - 1,
        "moe_layer_interval": shape.count("interleave_moe_layer_step", 1),
    }


class Ernie(Family):
    """`Ernie4_5ForCausalLM`: rope rotates adjacent elements; one flag adds a bias to every linear."""

    architectures = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")
    model_type = "ernie4_5"
    defaults: ClassVar = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    cases: ClassVar = {"biases": {"use_bias": True, "tie_word_embeddings": True}, "plain": {"use_bias": False}}
    gguf: ClassVar = {"ernie4_5": Gguf(config=_dense)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, without its layers for multi-token prediction."""
        rope = rope_spec(config, head_dim_of(config), theta=500_000.0, interleaved=True)
        bias = config.flag("use_bias")
        return Traits(
            rope=lambda layer: rope,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            ignored=(r"^model\.mtp_",),
        )

    def mtp(self, config: ModelConfig) -> MtpSpec:
        """Describe the first of its layers for multi-token prediction, which is dense and uses the model's last norm.

        Hidden states are those before that norm, as in Baidu's training code.
        """
        embedding_norm, hidden_norm, linear = (
            f"model.mtp_{each}.0" for each in ("emb_norm", "hidden_norm", "linear_proj")
        )
        traits = replace(Ernie().traits(config), names={"model.layers": "model.mtp_block"})
        names = embedding_norm, hidden_norm, linear, "model.norm"
        return mtp_spec(config, traits, 0, names, normed=False, bias=config.flag("use_bias"))


class ErnieMoe(Family):
    """`Ernie4_5_MoeForCausalLM`: the first layers dense, then experts with a bias on the routing scores."""

    architectures = ("Ernie4_5_MoeForCausalLM",)
    model_type = "ernie4_5_moe"
    defaults: ClassVar = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    cases: ClassVar = {
        "shared": {
            "use_bias": True,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_norm_min": 0.7,
            "tie_word_embeddings": True,
        },
        "some-layers": {
            "use_bias": False,
            "moe_num_experts": 4,
            "moe_k": 1,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "moe_layer_interval": 2,
        },
    }
    gguf: ClassVar = {
        "ernie4_5-moe": Gguf(config=_experts, tensors={"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"})
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, from `moe_layer_start_index` to `moe_layer_end_index` with experts."""
        hidden, intermediate = config.count("hidden_size"), config.count("moe_intermediate_size", 1536)
        num_experts, num_shared = config.count("moe_num_experts", 64), config.index("moe_num_shared_experts", 2)
        every, start = config.count("moe_layer_interval", 1), config.index("moe_layer_start_index", 1)
        end = config.values.get("moe_layer_end_index")
        last = config.count("num_hidden_layers") - 1 if end in (None, -1) else config.index("moe_layer_end_index", 0)
        bias = config.flag("use_bias")

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec | None:
            if not start <= layer <= last or (layer + 1) % every:
                return None
            block = f"{prefix}.mlp"
            return MoeSpec(
                norm=norm,
                router=VectorSpec(f"{block}.gate.weight", (num_experts, hidden)),
                experts=separate_experts(f"{block}.experts", num_experts, hidden, intermediate),
                top_k=config.count("moe_k", 6),
                normalize=True,
                norm_floor=config.number("moe_norm_min", 1e-12),
                correction_bias=VectorSpec(f"{block}.moe_statics.e_score_correction_bias", (1, num_experts)),
                shared=(
                    gate_up_down(f"{block}.shared_experts", hidden, intermediate * num_shared, bias)
                    if num_shared
                    else None
                ),
            )

        return replace(Ernie().traits(config), moe=moe, head_bias=bias)

    def mtp(self, config: ModelConfig) -> MtpSpec:
        """Describe the same layer as that of models without experts."""
        return Ernie().mtp(config)
