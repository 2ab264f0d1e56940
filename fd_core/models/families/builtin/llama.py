"""Llama, and decoders that differ from it by little."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_PROJECTIONS = ("gate", "up", "down")


def _llama_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    """Return what distinguishes the families that are converted as Llama."""
    if count := shape.index("expert_count", 0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": count,
            "num_experts_per_tok": shape.count("expert_used_count"),
        }
    if "blk.0.attn_q.bias" in tensors and "blk.0.attn_output.bias" not in tensors:
        return {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
    return {}


class Llama(Family):
    """`LlamaForCausalLM`."""

    architectures = ("LlamaForCausalLM",)
    model_type = "llama"
    cases: ClassVar = {
        "plain": {},
        "biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
        "llama3-rope": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
        "linear-rope": {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "num_key_value_heads": 4,
        },
    }
    gguf: ClassVar = {
        "llama": Gguf(
            config=_llama_config,
            tensors={
                "ffn_gate_inp": "block_sparse_moe.gate",
                "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
                "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
                "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            },
            permuted=True,
        )
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, with biases if the config has them."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        bias = config.flag("attention_bias")
        return Traits(rope=lambda layer: rope, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


class Mistral(Family):
    """`MistralForCausalLM`: every layer uses the sliding window, if there is one."""

    architectures = ("MistralForCausalLM",)
    model_type = "mistral"
    defaults: ClassVar = {"num_key_value_heads": 8}
    cases: ClassVar = {"window": {"sliding_window": 7}, "none": {"sliding_window": None}}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model without biases."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        window = config.optional_count("sliding_window", 4096)
        return Traits(rope=lambda layer: rope, window=lambda layer: window)


class SmolLm3(Family):
    """`SmolLM3ForCausalLM`: some layers have no rope."""

    architectures = ("SmolLM3ForCausalLM",)
    model_type = "smollm3"
    defaults: ClassVar = {"num_key_value_heads": 4, "tie_word_embeddings": True}
    cases: ClassVar = {
        "listed": {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
        "windows": {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    }
    gguf: ClassVar = {"smollm3": Gguf(permuted=True)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; windows are those of `layer_types`, or without it of the layers without rope if
        `use_sliding_window` is set."""
        rope = rope_spec(config, head_dim_of(config), theta=2_000_000.0)
        count = config.count("num_hidden_layers")
        rotated = _rotated(config, count)
        window, unrotated_slide = config.optional_count("sliding_window"), config.flag("use_sliding_window")
        types = config.layer_types(count)

        def window_of(layer: int) -> int | None:
            slides = unrotated_slide and not rotated[layer] if types is None else types[layer] == "sliding_attention"
            return window if slides else None

        return replace(
            Llama().traits(config),
            rope=lambda layer: rope if rotated[layer] else rope.unrotated,
            window=window_of,
        )


class SeedOss(Family):
    """`SeedOssForCausalLM`: biases on q, k and v; the config may add one to the output."""

    architectures = ("SeedOssForCausalLM",)
    model_type = "seed_oss"
    defaults: ClassVar = {"head_dim": 128, "num_key_value_heads": 8}
    cases: ClassVar = {
        "usual": {"attention_bias": True, "attention_out_bias": False},
        "other-biases": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    }
    gguf: ClassVar = {
        "seed_oss": Gguf(config=lambda shape, tensors: {"attention_out_bias": "blk.0.attn_output.bias" in tensors})
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        return Traits(
            rope=lambda layer: rope,
            qkv_bias=config.flag("attention_bias", True),
            output_bias=config.flag("attention_out_bias"),
            mlp_bias=config.flag("mlp_bias"),
        )


class InternLm3(Family):
    """`InternLM3ForCausalLM`: one flag for biases on q, k and v, another for those on all other linears."""

    architectures = ("InternLM3ForCausalLM",)
    model_type = "internlm3"
    defaults: ClassVar = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    cases: ClassVar = {
        "dynamic-rope": {"rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 10000.0}},
        "biases": {"attention_bias": True, "mlp_bias": True},
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model, by the names of its authors or of `transformers`."""
        rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
        others = config.flag("bias", config.flag("mlp_bias"))
        return Traits(
            rope=lambda layer: rope,
            qkv_bias=config.flag("qkv_bias", config.flag("attention_bias")),
            output_bias=others,
            mlp_bias=others,
        )


_LLAMA4_TENSORS = {
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{each}": f"feed_forward.{each}_proj" for each in _PROJECTIONS},
    **{f"ffn_{each}_exps": f"feed_forward.experts.{{}}.{each}_proj" for each in _PROJECTIONS},
    **{f"ffn_{each}_shexp": f"feed_forward.shared_expert.{each}_proj" for each in _PROJECTIONS},
}


def _llama4_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    """Return the fields that a file has; llama.cpp assumes the others."""
    layers, whole = range(shape.count("block_count")), shape.values.get("attention.sliding_window") == 0
    return {
        "attention_chunk_size": None if whole else 8192,
        "no_rope_layers": [int(whole or layer % 4 != 3) for layer in layers],
        "moe_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" in tensors],
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "use_qk_norm": shape.count("expert_count") != 128,  # Maverick, unlike Scout, has no norms of heads
        "num_local_experts": shape.count("expert_count"),
        "num_experts_per_tok": shape.count("expert_used_count"),
        "intermediate_size": shape.count("expert_feed_forward_length"),
        "intermediate_size_mlp": shape.count("feed_forward_length"),
        "separate_experts": True,
    }


class Llama4(Family):
    """`Llama4ForCausalLM`: attention within chunks, or without rope; experts whose inputs are weighed.

    `Llama4ForConditionalGeneration` is the same model with images, whose text part is served.
    """

    architectures = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
    model_type = "llama4_text"
    defaults: ClassVar = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    cases: ClassVar = {
        "plain": {
            "attention_chunk_size": 7,
            "no_rope_layers": [1, 1, 0],
            "floor_scale": 8,
            "attn_scale": 0.3,
            "moe_layers": [0, 2],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "intermediate_size_mlp": 64,
        },
        "others": {
            "attention_chunk_size": 9,
            "no_rope_layer_interval": 2,
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "attention_bias": True,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 3,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "tie_word_embeddings": True,
        },
        "whole": {"attention_chunk_size": None, "num_local_experts": 3, "intermediate_size": 32},
    }
    gguf: ClassVar = {"llama4": Gguf(config=_llama4_config, tensors=_LLAMA4_TENSORS)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a text model; the layers without rope attend to everything, unless `layer_types` differs."""
        rope = rope_spec(config, head_dim_of(config), theta=500_000.0, interleaved=True)
        layers, hidden = config.count("num_hidden_layers"), config.count("hidden_size")
        rotated = _rotated(config, layers)
        chunk = config.optional_count("attention_chunk_size", 8192)
        types = config.layer_types(layers, "chunked_attention")
        if types is None:
            types = tuple("chunked_attention" if each and chunk else "full_attention" for each in rotated)
        unrotated = rope.unrotated
        if config.values.get("attn_temperature_tuning", True):  # published configs have 4 for true
            growth = config.count("floor_scale", 8192), config.number("attn_scale", 0.1)
            unrotated = replace(unrotated, growth=growth)
        count, inner, step = (
            config.count(field, default)
            for field, default in (
                ("num_local_experts", 16),
                ("intermediate_size", 8192),
                ("interleave_moe_layer_step", 1),
            )
        )
        every = tuple(range(step - 1, layers, step))
        sparse = every if config.values.get("moe_layers") is None else config.indices("moe_layers")

        def moe(layer: int, prefix: str, norm: NormSpec) -> MoeSpec | None:
            if layer not in sparse:
                return None
            block = f"{prefix}.feed_forward"
            if config.flag("separate_experts"):
                experts = separate_experts(f"{block}.experts", count, hidden, inner)
            else:
                stacked = partial(gate_up_down, f"{block}.experts", hidden, inner, names=("gate_up_proj", "down_proj"))
                experts = tuple(stacked(stack=(index, count), transposed=True) for index in range(count))
            return MoeSpec(
                norm=norm,
                router=VectorSpec(f"{block}.router.weight", (count, hidden)),
                experts=experts,
                top_k=config.count("num_experts_per_tok", 1),
                normalize=False,
                scoring="sigmoid",
                weighs_inputs=True,
                shared=gate_up_down(f"{block}.shared_expert", hidden, inner),
            )

        bias = config.flag("attention_bias")
        return Traits(
            rope=lambda layer: rope if rotated[layer] else unrotated,
            window=lambda layer: chunk if types[layer] == "chunked_attention" else None,
            chunked=True,
            moe=moe,
            qkv_bias=bias,
            output_bias=bias,
            head_norms="rotated" if config.flag("use_qk_norm", True) else "",
            names={f"mlp.{each}_proj": f"feed_forward.{each}_proj" for each in _PROJECTIONS},
            inner="intermediate_size_mlp",
            ignored=(r"^(vision_model|multi_modal_projector)\.",),
        )


def _rotated(config: ModelConfig, layers: int) -> tuple[int, ...]:
    """Return for each layer whether it has rope: those that are listed, or all but every fourth."""
    every = config.count("no_rope_layer_interval", 4)
    rotated = config.indices("no_rope_layers") or tuple(int((layer + 1) % every != 0) for layer in range(layers))
    if len(rotated) < layers:
        raise ModelError(f"{config.origin}: no_rope_layers must list {layers} layers")
    return rotated
