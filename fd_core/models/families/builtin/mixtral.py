"""Mixtral, and MiniMax-M2, whose experts are stored likewise."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import MoeSpec, NormSpec, Traits, VectorSpec, head_dim_of, rope_spec, separate_experts
from fd_core.models.loading.config import ModelConfig


def _moe(config: ModelConfig, layer: int, prefix: str, norm: NormSpec) -> MoeSpec:
    """Return the experts of a layer; the weights of a token's experts sum to 1."""
    hidden, count = config.count("hidden_size"), config.count("num_local_experts", 8)
    block = f"{prefix}.block_sparse_moe"
    return MoeSpec(
        norm=norm,
        router=VectorSpec(f"{block}.gate.weight", (count, hidden)),
        experts=separate_experts(
            f"{block}.experts", count, hidden, config.count("intermediate_size"), names=("w1", "w3", "w2")
        ),
        top_k=config.count("num_experts_per_tok", 2),
        normalize=True,
    )


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
        """Describe a model."""
        rope = rope_spec(config, head_dim_of(config), theta=1_000_000.0)
        window = config.optional_count("sliding_window")
        return Traits(rope=lambda layer: rope, window=lambda layer: window, moe=partial(_moe, config))


def _minimax_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return {"num_local_experts": shape.count("expert_count"), "num_experts_per_tok": shape.count("expert_used_count")}


class MiniMaxM2(Family):
    """`MiniMaxM2ForCausalLM`: corrected sigmoid scores; all query heads have one norm, and all key heads."""

    architectures = ("MiniMaxM2ForCausalLM",)
    model_type = "minimax_m2"
    defaults: ClassVar = {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 1536,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    }
    cases: ClassVar = {
        "plain": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "rotary_dim": 12}
    }
    gguf: ClassVar = {
        "minimax-m2": Gguf(
            config=_minimax_config,
            tensors={
                "ffn_gate_inp": "block_sparse_moe.gate",
                "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
                "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
                "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
                "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            },
        )
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; published configs have the rotated elements of a head in `rotary_dim`."""
        width = head_dim_of(config)

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec:
            block = _moe(config, layer, prefix, norm)
            bias = VectorSpec(f"{prefix}.block_sparse_moe.e_score_correction_bias", (len(block.experts),))
            return replace(block, scoring="sigmoid", correction_bias=bias)

        share = config.count("rotary_dim", width) / width
        rope = rope_spec(config, width, theta=5_000_000.0, rotary=share)
        return Traits(rope=lambda layer: rope, moe=moe, head_norms="joint")
