"""Gemma."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar, Final

from fd_core.errors import ModelError
from fd_core.models.families.contract import Family, Gguf, StoredTensors
from fd_core.models.families.spec import RopeSpec, Traits, head_dim_of, rope_spec, scaled_rope_spec
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.gguf_family import windows

_GLOBAL_THETA: Final = 1_000_000.0
_LOCAL_THETA: Final = 10_000.0
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_PATTERN: Final = 6
"""By default, every sixth layer has full attention."""


def _gemma2_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    heads, hidden = shape.count("attention.head_count"), shape.count("embedding_length")
    # The 27B model, identified by its 46 layers, scales queries by hidden size / heads, the others by the head size.
    wide = shape.count("block_count") == 46
    return {
        "query_pre_attn_scalar": hidden // heads if wide else shape.count("attention.key_length", hidden // heads),
        **windows(shape, every=2, window=4096),
        "final_logit_softcapping": shape.single("final_logit_softcapping", 30.0),
        "attn_logit_softcapping": shape.single("attn_logit_softcapping", 50.0),
    }


def _gemma3_config(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    layers = shape.count("block_count")
    heads = shape.count("attention.head_count")
    hidden = shape.count("embedding_length")
    # The 27B model, identified by its 62 layers, scales queries by hidden size / heads, the others by the head size.
    scalar = hidden // heads if layers == 62 else shape.count("attention.key_length", hidden // heads)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        **windows(shape, every=_PATTERN, window=shape.count("attention.sliding_window")),
        "rope_local_base_freq": shape.single("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": shape.optional_single("final_logit_softcapping"),
    }


class Gemma(Family):
    """`GemmaForCausalLM`: norms with `1 + weight`, embeddings multiplied by the root of the hidden size."""

    architectures = ("GemmaForCausalLM",)
    model_type = "gemma"
    defaults: ClassVar = {"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True}
    cases: ClassVar = {"plain": {"tie_word_embeddings": True}, "biases": {"attention_bias": True}}
    gguf: ClassVar = {"gemma": Gguf(config=lambda shape, tensors: {"hidden_act": "gelu"}, norm_offset=1.0)}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model. Its gelu is the approximated one, which old configs name gelu."""
        rope = rope_spec(config, head_dim_of(config), theta=_LOCAL_THETA)
        bias = config.flag("attention_bias")
        return Traits(
            rope=lambda layer: rope,
            qkv_bias=bias,
            output_bias=bias,
            norm_offset=1.0,
            embedding_scale=math.sqrt(config.count("hidden_size")),
            activation="gelu_tanh" if config.text("hidden_act", "gelu") == "gelu" else "hidden_act",
        )


class Gemma2(Family):
    """`Gemma2ForCausalLM`: every other layer slides, norms before and after each block, capped scores and logits."""

    architectures = ("Gemma2ForCausalLM",)
    model_type = "gemma2"
    defaults: ClassVar = {"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True}
    cases: ClassVar = {
        "capped": {
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 15.0,
            "attn_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        "biases": {
            "attention_bias": True,
            "hidden_activation": "gelu",
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    }
    gguf: ClassVar = {
        "gemma2": Gguf(config=_gemma2_config, tensors={"ffn_norm": "pre_feedforward_layernorm"}, norm_offset=1.0)
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model. Raises `ModelError` for attention in both directions."""
        config.refuse("use_bidirectional_attention", "a decoder attends only to earlier tokens")
        count, window = config.count("num_hidden_layers"), config.count("sliding_window", 4096)
        types = config.layer_types(count) or ("sliding_attention", "full_attention") * count
        return replace(
            Gemma().traits(config),
            window=lambda layer: window if types[layer] == "sliding_attention" else None,
            scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
            norms="around",
            activation="hidden_activation",
            attention_softcap=config.optional_number("attn_logit_softcapping", 50.0),
            softcap=config.optional_number("final_logit_softcapping", 30.0),
        )


class Gemma3(Family):
    """`Gemma3ForCausalLM`: sliding layers with a separate rope, norms before and after each block."""

    architectures = ("Gemma3ForCausalLM",)
    model_type = "gemma3_text"
    defaults: ClassVar = {**Gemma2.defaults, "sliding_window": 4096}
    cases: ClassVar = {
        "mixed": {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
        },
        "biases": {
            "attention_bias": True,
            "hidden_activation": "gelu",
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    }
    gguf: ClassVar = {
        "gemma3": Gguf(config=_gemma3_config, tensors={"ffn_norm": "pre_feedforward_layernorm"}, norm_offset=1.0)
    }

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a text model. Raises `ModelError` for attention in both directions."""
        config.refuse("use_bidirectional_attention", "a decoder attends only to earlier tokens")
        return gemma3_traits(config)


def gemma3_traits(config: ModelConfig) -> Traits:
    """Describe a text model of Gemma 3, whose tokens attend to earlier ones."""
    num_layers = config.count("num_hidden_layers")
    types = config.layer_types(num_layers)
    if types is None:
        pattern = config.count("sliding_window_pattern", _PATTERN)
        types = tuple(f"{'sliding' if (layer + 1) % pattern else 'full'}_attention" for layer in range(num_layers))
    theta, local_theta = config.number("rope_theta", _GLOBAL_THETA), config.number("rope_local_base_freq", _LOCAL_THETA)
    full, sliding = ropes_of_kinds(config, theta, local_theta)
    window = config.count("sliding_window")
    bias = config.flag("attention_bias")
    return Traits(
        rope=lambda layer: sliding if types[layer] == "sliding_attention" else full,
        window=lambda layer: window if types[layer] == "sliding_attention" else None,
        scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        head_norms="before rope",
        norms="around",
        norm_offset=1.0,
        embedding_scale=math.sqrt(config.count("hidden_size")),
        activation="hidden_activation",
        softcap=config.optional_number("final_logit_softcapping"),
    )


def ropes_of_kinds(
    config: ModelConfig, theta: float, local_theta: float, scaled: Collection[str] = (_FULL,)
) -> tuple[RopeSpec, RopeSpec]:
    """Return the ropes of full-attention layers and of sliding layers, by default of these bases.

    `rope_parameters` has them by the kind of layer; a `rope_scaling` of old configs changes those of `scaled`.
    """
    parameters, scaling = (config.part(field) or ModelConfig({}) for field in ("rope_parameters", "rope_scaling"))
    if not parameters.values.keys() <= {_FULL, _SLIDING}:
        raise ModelError(f"{config.origin}: rope_parameters must name {_FULL} and {_SLIDING} alone")

    def of(kind: str, theta: float) -> RopeSpec:
        part = parameters.part(kind) or ModelConfig({}, f"rope_parameters.{kind}.", config.origin)
        values = {"rope_type": "default", **part.values, **(scaling.values if kind in scaled else {})}
        if values.get("type", values["rope_type"]) != values["rope_type"] or not values.get("truncate", True):
            raise ModelError(
                f"{config.origin}: rope of {kind} has type={values.get('type')!r:.40}, truncate="
                f"{values.get('truncate')!r:.40}, which models with several ropes cannot have",
                hint="state the type as rope_type, and omit truncate",
            )
        return scaled_rope_spec(config, replace(part, values=values), head_dim_of(config), theta=theta)

    return of(_FULL, theta), of(_SLIDING, local_theta)
