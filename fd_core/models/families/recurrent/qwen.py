"""Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Final

from fd_core.models.families.builtin.qwen import SHARED_EXPERT, gated_experts, gguf_shared_expert
from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import (
    LinearSpec,
    MtpSpec,
    NormSpec,
    RecurrentSpec,
    Traits,
    VectorSpec,
    head_dim_of,
    mtp_spec,
    rope_spec,
)
from fd_core.models.loading.config import ModelConfig

_SIZES: Final = {
    "rms_norm_eps": 1e-4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
_SHARED: Final = {
    *(name for name in _SIZES if name.startswith(("linear_", "rms"))),
    *("linear_conv_kernel_dim", "partial_rotary_factor", "attention_bias", "num_hidden_layers", "layer_types"),
}
"""Fields of cases that are not about experts."""


def _gguf_dense(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    heads = shape.count("ssm.time_step_rank")
    attends = [f"blk.{layer}.attn_q.weight" in tensors for layer in range(shape.count("block_count"))]
    return {
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "linear_conv_kernel_dim": shape.count("ssm.conv_kernel"),
        "linear_key_head_dim": shape.count("ssm.state_size"),
        "linear_num_key_heads": shape.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": shape.count("ssm.inner_size") // heads,
        "separate_inputs": True,
    }


def _gguf_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    return gguf_shared_expert(shape, tensors) | _gguf_dense(shape, tensors) | {"norm_topk_prob": True}


_STORED: Final = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


def separate_inputs(prefix: str, outs: tuple[int, ...], hidden: int, key_heads: int) -> LinearSpec:
    """Describe the linears to q, k, v, to z, to b and to a, as Qwen3.5 and GGUF files have them."""
    names = tuple(f"{prefix}.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
    return LinearSpec(names, outs, hidden, counts=(3, 1, 1, 1))


_MTP: Final = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
    "": "mtp.layers.0.",
}
"""Names of the layer for multi-token prediction, see `Gguf.mtp`."""


class Qwen3Next(Family):
    """`Qwen3NextForCausalLM`: gated delta nets, every fourth layer with gated attention, and experts."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3NextForCausalLM",)
    model_type = "qwen3_next"
    defaults: ClassVar = {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }
    cases: ClassVar = {
        "plain": {
            **_SIZES,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        "biases": {
            **_SIZES,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        },
    }

    gguf: ClassVar = {
        "qwen3next": Gguf(
            config=_gguf_config,
            tensors={
                **SHARED_EXPERT,
                **_STORED,
            },
            norm_offset=1.0,
            mtp=_MTP,
        )
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, without the layers that predict further tokens."""
        return replace(self.dense(config), moe=gated_experts(config))

    def mtp(self, config: ModelConfig) -> MtpSpec:
        """Describe the first layer for multi-token prediction, which has attention."""
        traits = replace(self.traits(config), names={"model.layers": "mtp.layers"}, recurrent=lambda *_: None)
        parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        embedding_norm, hidden_norm, linear, norm = (f"mtp.{part}" for part in parts)
        return mtp_spec(config, traits, 0, (embedding_norm, hidden_norm, linear, norm))

    def dense(self, config: ModelConfig) -> Traits:
        """Describe a model without experts."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0, rotary=0.25)
        layers, every = config.count("num_hidden_layers"), config.count("full_attention_interval", 4)
        types = config.layer_types(layers, "linear_attention")
        bias = config.flag("attention_bias")

        def recurrent(layer: int, prefix: str, norm: NormSpec | None) -> RecurrentSpec | None:
            attends = (layer + 1) % every == 0 if types is None else types[layer] == "full_attention"
            return None if attends else self.delta_net(config, f"{prefix}.linear_attn", norm)

        return Traits(
            rope=lambda layer: rope,
            recurrent=recurrent,
            gated_attention=True,
            qkv_bias=bias,
            output_bias=bias,
            head_norms="before rope",
            norm_offset=1.0,
            ignored=(r"^mtp\.",),
        )

    def delta_net(self, config: ModelConfig, prefix: str, norm: NormSpec | None) -> RecurrentSpec:
        """Describe a gated delta net."""
        hidden, taps = config.count("hidden_size"), config.count("linear_conv_kernel_dim")
        key_heads, value_heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
        key_dim, value_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
        keys, values = key_heads * key_dim, value_heads * value_dim
        return RecurrentSpec(
            norm=norm,
            inputs=(separate_inputs if config.flag("separate_inputs") else self.inputs)(
                prefix, (keys, keys, values, values, value_heads, value_heads), hidden, key_heads
            ),
            output=LinearSpec((f"{prefix}.out_proj",), (hidden,), values),
            rule="delta",
            conv=VectorSpec(f"{prefix}.conv1d.weight", (2 * keys + values, 1, taps)),
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            decay=VectorSpec(f"{prefix}.A_log", (value_heads,)),
            time_bias=VectorSpec(f"{prefix}.dt_bias", (value_heads,)),
            head_norm=VectorSpec(f"{prefix}.norm.weight", (value_dim,)),
            head_eps=config.number("rms_norm_eps", 1e-6),
        )

    def inputs(self, prefix: str, outs: tuple[int, ...], hidden: int, key_heads: int) -> LinearSpec:
        """Describe the linears to q, k, v, z, b, a, whose rows are divided by heads of keys."""
        names = (f"{prefix}.in_proj_qkvz", f"{prefix}.in_proj_ba")
        return LinearSpec(names, outs, hidden, counts=(4, 2), groups=key_heads)


_STORED_35: Final = {**_STORED, "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"}


class Qwen35(Qwen3Next):
    """`Qwen3_5ForCausalLM`: as Qwen3-Next without experts, other linears."""

    architectures = ("Qwen3_5ForCausalLM",)
    model_type = "qwen3_5_text"
    gguf: ClassVar = {
        "qwen35": Gguf(
            config=_gguf_dense,
            tensors=_STORED_35,
            norm_offset=1.0,
            mtp=_MTP,
            tiled=True,
        )
    }
    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        **{name: Qwen3Next.defaults[name] for name in Qwen3Next.defaults if name.startswith(("linear_", "head_dim"))},
    }
    cases: ClassVar = {
        name: {field: case[field] for field in case if field in _SHARED} for name, case in Qwen3Next.cases.items()
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, whose files may have the encoder of images."""
        return replace(self.dense(config), ignored=(r"^mtp\.", r"^visual\."))

    def inputs(self, prefix: str, outs: tuple[int, ...], hidden: int, key_heads: int) -> LinearSpec:
        """Describe the linears, which are stored apart."""
        return separate_inputs(prefix, outs, hidden, key_heads)


class Qwen35Moe(Qwen35):
    """`Qwen3_5MoeForCausalLM`: as Qwen3.5, with the experts of Qwen3-Next in every layer."""

    architectures = ("Qwen3_5MoeForCausalLM",)
    model_type = "qwen3_5_moe_text"
    gguf: ClassVar = {
        "qwen35moe": Gguf(
            config=_gguf_config,
            tensors={**SHARED_EXPERT, **_STORED_35},
            norm_offset=1.0,
            tiled=True,
        )
    }
    defaults: ClassVar = {
        **{name: value for name, value in Qwen35.defaults.items() if name != "intermediate_size"},
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
    cases: ClassVar = {"plain": {**_SIZES, **Qwen35.cases["plain"]}, "biases": {**_SIZES, **Qwen35.cases["biases"]}}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model."""
        return replace(super().traits(config), moe=gated_experts(config, normalize=True))
