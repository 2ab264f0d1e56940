"""Granite 4 and Nemotron-H, whose recurrent layers are those of Mamba 2."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

from fd_core.errors import ModelError
from fd_core.models.families.builtin.granite import UNROTATED, Granite, gguf_factors
from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import (
    LinearSpec,
    MoeSpec,
    NormSpec,
    RecurrentSpec,
    Traits,
    VectorSpec,
    gate_up_down,
    head_dim_of,
    rope_spec,
    separate_experts,
)
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.gguf_family import layers_with

_PARTS: Final = ("input_linear", "output_linear")
_FEED_FORWARD: Final = ("mlp", "moe")


def mamba(
    config: ModelConfig,
    prefix: str,
    norm: NormSpec | None,
    *,
    groups: int,
    heads: int,
    state: int,
    head_dim: int,
    taps: int,
    bias: bool,
    conv_bias: bool,
    **more: Any,
) -> RecurrentSpec:
    """Describe a layer of Mamba 2; `groups` of heads share their keys and queries, which have `state` elements."""
    hidden, values, keys = config.count("hidden_size"), heads * head_dim, groups * state
    if heads % groups:
        raise ModelError(f"{config.origin}: {heads} heads of a recurrent layer are not a multiple of {groups} groups")
    channels = values + 2 * keys
    return RecurrentSpec(
        norm=norm,
        inputs=LinearSpec((f"{prefix}.in_proj",), (values, values, keys, keys, heads), hidden, bias=bias),
        output=LinearSpec((f"{prefix}.out_proj",), (hidden,), values, bias=bias),
        rule="scan",
        conv=VectorSpec(f"{prefix}.conv1d.weight", (channels, 1, taps)),
        conv_bias=VectorSpec(f"{prefix}.conv1d.bias", (channels,)) if conv_bias else None,
        key_heads=groups,
        value_heads=heads,
        key_dim=state,
        value_dim=head_dim,
        decay=VectorSpec(f"{prefix}.A_log", (heads,)),
        time_bias=VectorSpec(f"{prefix}.dt_bias", (heads,)),
        head_norm=VectorSpec(f"{prefix}.norm.weight", (values,)),
        skip=VectorSpec(f"{prefix}.D", (heads,)),
        **more,
    )


def _time_limits(config: ModelConfig) -> tuple[float, float]:
    match config.values.get("time_step_limit"):
        case None:
            return 0.0, math.inf
        case [int() | float() as low, {"__float__": "Infinity"}] if low >= 0:  # as transformers writes it
            return float(low), math.inf
        case [int() | float() as low, int() | float() as high] if 0 <= low < high:
            return float(low), float(high)
        case wrong:
            raise ModelError(f"{config.origin}: time_step_limit must be two increasing numbers, got {wrong!r}")


_STORED: Final = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}


def _has(tensors: StoredTensors, part: str) -> bool:
    return any(name.endswith(f".{part}") for name in tensors)


def _granite_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    attends, inner = layers_with(shape, "attention.head_count_kv"), shape.count("ssm.inner_size")
    heads = shape.count("ssm.time_step_rank")
    return gguf_factors(shape, tensors) | {
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "num_local_experts": shape.index("expert_count", 0),
        "num_experts_per_tok": shape.index("expert_used_count", 0),
        "shared_intermediate_size": shape.count("expert_shared_feed_forward_length"),
        "separate_experts": True,
        "attention_bias": _has(tensors, "attn_q.bias"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner / shape.count("embedding_length"),
        "mamba_n_groups": shape.count("ssm.group_count"),
        "mamba_d_state": shape.count("ssm.state_size"),
        "mamba_d_conv": shape.count("ssm.conv_kernel"),
        "mamba_conv_bias": _has(tensors, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(tensors, "ssm_in.bias"),
    }


def _nemotron_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    kinds = {"ffn_gate_inp": "moe", "ffn_up": "mlp", "ssm_in": "linear_attention", "attn_q": "full_attention"}
    heads, groups = shape.count("ssm.time_step_rank"), shape.count("expert_group_count", 1)
    widths = [tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".ffn_up.weight")]
    experts = {
        "n_routed_experts": shape.index("expert_count", 0),
        "num_experts_per_tok": shape.index("expert_used_count", 0),
        "moe_intermediate_size": shape.index("expert_feed_forward_length", 0),
        "moe_shared_expert_intermediate_size": shape.index("expert_shared_feed_forward_length", 0),
        "routed_scaling_factor": shape.single("expert_weights_scale", 1.0),
        "norm_topk_prob": shape.flag("expert_weights_norm"),
        "n_group": groups,
        "topk_group": shape.count("expert_group_used_count", groups),
    }
    return UNROTATED | {
        "layers_block_type": [
            next((kind for part, kind in kinds.items() if f"blk.{layer}.{part}.weight" in tensors), "unknown")
            for layer in range(shape.count("block_count"))
        ],
        **({"intermediate_size": widths[0]} if widths else {}),
        **(experts if "expert_count" in shape.values else {}),
        "moe_latent_size": shape.optional_count("moe_latent_size"),
        "layer_norm_epsilon": shape.single("attention.layer_norm_rms_epsilon"),
        "mlp_hidden_act": "relu2",
        "mlp_bias": _has(tensors, "ffn_up.bias") or _has(tensors, "ffn_up_shexp.bias"),
        "mamba_num_heads": heads,
        "mamba_head_dim": shape.count("ssm.inner_size") // heads,
        "n_groups": shape.count("ssm.group_count"),
        "ssm_state_size": shape.count("ssm.state_size"),
        "conv_kernel": shape.count("ssm.conv_kernel"),
        "use_conv_bias": _has(tensors, "ssm_conv1d.bias"),
        "use_bias": _has(tensors, "ssm_in.bias"),
    }


class GraniteHybrid(Family):
    """`GraniteMoeHybridForCausalLM`: layers of Mamba 2 and of attention, and shared experts with or without others."""

    architectures = ("GraniteMoeHybridForCausalLM",)
    model_type = "granitemoehybrid"
    defaults: ClassVar = {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
    }
    cases: ClassVar = {
        "experts": {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "shared_intermediate_size": 40,
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_expand": 3,
            "hidden_size": 60,
            "mamba_d_state": 12,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
            "rms_norm_eps": 1e-5,
        },
        "dense": {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_head": 16,
            "mamba_d_state": 9,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "time_step_limit": [0.25, 0.75],
        },
    }

    gguf: ClassVar = {
        "granitehybrid": Gguf(
            config=_granite_config,
            tensors={
                "ffn_gate_inp": "block_sparse_moe.router.layer",
                **{part: f"mamba.{name}" for part, name in _STORED.items()},
            },
            permuted=True,
        )
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model."""
        if config.activation() != "silu":
            raise ModelError(f"{config.origin}: recurrent layers have no other hidden_act than silu")
        hidden, heads = config.count("hidden_size"), config.count("mamba_n_heads")
        width = round(config.number("mamba_expand") * hidden)
        automatic = config.values.get("mamba_d_head") in (None, "auto")
        sizes = {
            "groups": config.count("mamba_n_groups"),
            "heads": heads,
            "state": config.count("mamba_d_state"),
            "head_dim": width // heads if automatic else config.count("mamba_d_head"),
            "taps": config.count("mamba_d_conv"),
        }
        if sizes["head_dim"] * heads != width:
            raise ModelError(f"{config.origin}: {heads} heads of {sizes['head_dim']} elements are not {width} wide")
        types = config.layer_types(config.count("num_hidden_layers"), "linear_attention")
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        rope = rope if config.text("position_embedding_type", "nope") == "rope" else rope.unrotated

        def recurrent(layer: int, prefix: str, norm: NormSpec | None) -> RecurrentSpec | None:
            if types is not None and types[layer] == "full_attention":
                return None
            return mamba(
                config,
                f"{prefix}.mamba",
                norm,
                **sizes,
                bias=config.flag("mamba_proj_bias"),
                conv_bias=config.flag("mamba_conv_bias"),
                head_eps=config.number("rms_norm_eps", 1e-6),
                time_limits=_time_limits(config),
            )

        traits = replace(
            Granite().traits(config),
            rope=lambda layer: rope,
            recurrent=recurrent,
            moe=partial(self.experts, config),
            inner="shared_intermediate_size",
        )
        if config.flag("separate_experts"):
            return traits
        return replace(
            traits,
            fused={"gate_up": "shared_mlp.input_linear"},
            names={"mlp.down_proj": "shared_mlp.output_linear"},
        )

    def experts(self, config: ModelConfig, layer: int, prefix: str, norm: NormSpec) -> MoeSpec | None:
        """Describe the experts of a layer, which are in one tensor except in GGUF files; None without them."""
        count = config.index("num_local_experts", 0)
        if not count:
            return None
        hidden, inner, shared = (
            config.count(each) for each in ("hidden_size", "intermediate_size", "shared_intermediate_size")
        )
        block = f"{prefix}.block_sparse_moe"
        stacked = partial(gate_up_down, block, hidden, inner, names=_PARTS)
        experts = tuple(stacked(stack=(index, count)) for index in range(count))
        always = gate_up_down(f"{prefix}.shared_mlp", hidden, shared, names=_PARTS)
        if config.flag("separate_experts"):
            experts = separate_experts(f"{prefix}.mlp.experts", count, hidden, inner)
            always = gate_up_down(f"{prefix}.mlp.shared_experts", hidden, shared)
        return MoeSpec(
            norm=norm,
            router=VectorSpec(f"{block}.router.layer.weight", (count, hidden)),
            experts=experts,
            top_k=config.count("num_experts_per_tok"),
            normalize=True,
            shared=always,
        )


class NemotronH(Family):
    """`NemotronHForCausalLM`: each stored layer is one of Mamba 2, of attention without positions, or feed-forward."""

    architectures = ("NemotronHForCausalLM",)
    model_type = "nemotron_h"
    renamed: ClassVar = {"hidden_act": "mamba_hidden_act", "tie_word_embeddings": "(transformers ignores it)"}
    defaults: ClassVar = {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    }
    cases: ClassVar = {
        "plain": {
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
            "layer_norm_epsilon": 1e-4,
            "mamba_num_heads": 6,
            "mamba_head_dim": 20,
            "n_groups": 2,
            "ssm_state_size": 12,
            "time_step_min": 0.3,
        },
        "biases": {
            "layers_block_type": ["full_attention", "linear_attention", "moe", "linear_attention", "mlp"],
            "mlp_bias": True,
            "mlp_hidden_act": "silu",
            "mamba_num_heads": 4,
            "mamba_head_dim": 9,
            "n_groups": 2,
            "ssm_state_size": 7,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 32,
            "norm_topk_prob": False,
        },
        "experts": {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 9,
            "n_groups": 2,
            "ssm_state_size": 7,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
            "n_group": 3,
            "topk_group": 2,
        },
    }

    gguf: ClassVar = dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        Gguf(
            config=_nemotron_config,
            tensors={
                "attn_norm": "norm",
                "attn_output": "mixer.o_proj",
                **{f"attn_{each}": f"mixer.{each}_proj" for each in "qkv"},
                **{f"ffn_{each}": f"mixer.{each}_proj" for each in ("up", "down")},
                "ffn_gate_inp": "mixer.gate",
                "exp_probs_b": "mixer.gate.e_score_correction_bias",
                **{f"ffn_{each}_exps": f"mixer.experts.{{}}.{each}_proj" for each in ("up", "down")},
                **{f"ffn_{each}_shexp": f"mixer.shared_experts.{each}_proj" for each in ("up", "down")},
                **{part: f"mixer.{name}" for part, name in _STORED.items()},
            },
            top={"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
            permuted=True,
        ),
    )

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; neither feed-forward blocks nor experts have a gate."""
        kinds = self.kinds(config)
        mixers = [index for index, kind in enumerate(kinds) if kind not in _FEED_FORWARD]
        follows = [index + 1 < len(kinds) and kinds[index + 1] in _FEED_FORWARD for index in mixers]
        if not mixers or len(mixers) + sum(follows) != len(kinds):
            raise ModelError(f"{config.origin}: a feed-forward layer must follow one of attention or Mamba 2")
        if config.activation() != "silu":
            raise ModelError(f"{config.origin}: recurrent layers have no other mamba_hidden_act than silu")
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0).unrotated

        def recurrent(layer: int, prefix: str, norm: NormSpec | None) -> RecurrentSpec | None:
            if kinds[mixers[layer]] == "full_attention":
                return None
            return mamba(
                config,
                f"{prefix}.mixer",
                norm,
                groups=config.count("n_groups"),
                heads=config.count("mamba_num_heads"),
                state=config.count("ssm_state_size"),
                head_dim=config.count("mamba_head_dim"),
                taps=config.count("conv_kernel"),
                bias=config.flag("use_bias"),
                conv_bias=config.flag("use_conv_bias"),
                head_eps=config.number("layer_norm_epsilon", 1e-5),
                time_limits=(config.number("time_step_min"), math.inf),
            )

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec | None:
            return self.experts(config, f"{prefix}.mixer", norm) if kinds[mixers[layer] + 1] == "moe" else None

        return Traits(
            rope=lambda layer: rope,
            recurrent=recurrent,
            moe=moe,
            stored=tuple((at, at + 1 if pair else None) for at, pair in zip(mixers, follows, strict=True)),
            mlp_bias=config.flag("mlp_bias"),
            gated=False,
            activation="mlp_hidden_act",
            eps="layer_norm_epsilon",
            names={
                "model.embed_tokens": "model.embeddings",
                "model.norm": "model.norm_f",
                "input_layernorm": "norm",
                "post_attention_layernorm": "norm",
                **{f"self_attn.{each}_proj": f"mixer.{each}_proj" for each in "qkvo"},
                **{f"mlp.{each}_proj": f"mixer.{each}_proj" for each in ("up", "down")},
            },
            ignored=(r"^mtp\.",),
        )

    def experts(self, config: ModelConfig, prefix: str, norm: NormSpec) -> MoeSpec:
        """Describe the experts of a layer, and the one that every token uses."""
        config.refuse("moe_latent_size", "experts of latent vectors are not supported")
        count, hidden, bias = config.count("n_routed_experts"), config.count("hidden_size"), config.flag("mlp_bias")

        def linears(name: str, width: int, bias: bool = False) -> tuple[LinearSpec, LinearSpec]:
            up, down = (f"{prefix}.{name}.{part}_proj" for part in ("up", "down"))
            return LinearSpec((up,), (width,), hidden, bias=bias), LinearSpec((down,), (hidden,), width, bias=bias)

        inner = config.count("moe_intermediate_size")
        return MoeSpec(
            norm=norm,
            router=VectorSpec(f"{prefix}.gate.weight", (count, hidden)),
            experts=tuple(linears(f"experts.{index}", inner) for index in range(count)),
            top_k=config.count("num_experts_per_tok"),
            normalize=config.flag("norm_topk_prob"),
            norm_floor=1e-20,
            scoring="sigmoid",
            correction_bias=VectorSpec(f"{prefix}.gate.e_score_correction_bias", (count,)),
            groups=config.count("n_group"),
            top_groups=config.count("topk_group"),
            weight_scale=config.number("routed_scaling_factor"),
            shared=linears("shared_experts", config.count("moe_shared_expert_intermediate_size"), bias),
        )

    def kinds(self, config: ModelConfig) -> list[str]:
        """Return the kind of each stored layer, in the names of `transformers`."""
        pattern = config.text("hybrid_override_pattern", "")
        letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
        found = [letters.get(letter, letter) for letter in pattern] or config.strings("layers_block_type")
        found = [{"mamba": "linear_attention", "attention": "full_attention"}.get(kind, kind) for kind in found]
        if wrong := set(found) - {"linear_attention", "full_attention", *_FEED_FORWARD}:
            raise ModelError(f"{config.origin}: layers of the kind {sorted(wrong)[0]} are not supported")
        return found
