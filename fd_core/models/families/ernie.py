"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from fd_core.models.loading.config import ModelConfig
from fd_core.models.rope import rope_spec
from fd_core.models.spec import MoeSpec, Traits, VectorSpec, gate_up_down, head_dim_of

__all__ = ["ernie", "ernie_moe"]


def ernie(config: ModelConfig) -> Traits:
    """Describe `Ernie4_5ForCausalLM`: rope turns neighbouring elements; one flag gives every linear a bias."""
    rope = rope_spec(config, head_dim_of(config), theta=500_000.0, interleaved=True)
    bias = config.flag("use_bias")
    return Traits(
        rope=lambda layer: rope,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        tied=True,
        ignored=(r"^model\.mtp_",),
    )


def ernie_moe(config: ModelConfig) -> Traits:
    """Describe `Ernie4_5_MoeForCausalLM`: the first layers dense, then experts with a bias on their choice."""
    hidden, intermediate = config.count("hidden_size"), config.count("moe_intermediate_size", 1536)
    num_experts, num_shared = config.count("moe_num_experts", 64), config.index("moe_num_shared_experts", 2)
    every, start = config.count("moe_layer_interval", 1), config.index("moe_layer_start_index", 1)
    end = config.values.get("moe_layer_end_index")
    last = config.count("num_hidden_layers") - 1 if end in (None, -1) else config.index("moe_layer_end_index", 0)
    bias = config.flag("use_bias")

    def moe(layer: int, prefix: str, norm: VectorSpec) -> MoeSpec | None:
        if not start <= layer <= last or (layer + 1) % every:
            return None
        block = f"{prefix}.mlp"
        return MoeSpec(
            norm=norm,
            router=VectorSpec(f"{block}.gate.weight", (num_experts, hidden)),
            experts=tuple(
                gate_up_down(f"{block}.experts.{expert}", hidden, intermediate) for expert in range(num_experts)
            ),
            top_k=config.count("moe_k", 6),
            normalize=True,
            norm_floor=config.number("moe_norm_min", 1e-12),
            correction_bias=VectorSpec(f"{block}.moe_statics.e_score_correction_bias", (1, num_experts)),
            shared=(
                gate_up_down(f"{block}.shared_experts", hidden, intermediate * num_shared, bias) if num_shared else None
            ),
        )

    return replace(ernie(config), moe=moe, head_bias=bias)
