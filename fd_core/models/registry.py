"""Registry of architectures, and the entry point that loads one."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from fd_core.errors import ConfigError, ModelError
from fd_core.models.build import ProgressSink, build_decoder, check_tensors
from fd_core.models.decoder import DecoderModel
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.classifier import CLASSIFICATION
from fd_core.models.loading.config import ModelConfig
from fd_core.models.spec import (
    DecoderSpec,
    MoeSpec,
    RopeSpec,
    Traits,
    VectorSpec,
    decoder_spec,
    gate_up_down,
    head_dim_of,
    rope_spec,
    scaled_rope_spec,
)
from fd_core.ops.contract import Ops


def llama(config: ModelConfig) -> Traits:
    """Describe `LlamaForCausalLM`."""
    rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
    bias = config.flag("attention_bias")
    return Traits(rope=lambda layer: rope, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def mistral(config: ModelConfig) -> Traits:
    """Describe `MistralForCausalLM`: every layer uses the sliding window, if there is one."""
    rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
    window = config.optional_count("sliding_window")
    return Traits(rope=lambda layer: rope, window=lambda layer: window)


def qwen2(config: ModelConfig) -> Traits:
    """Describe `Qwen2ForCausalLM`: biases on q, k and v."""
    rope = rope_spec(config, head_dim_of(config), theta=10_000.0)
    return Traits(rope=lambda layer: rope, window=_window(config), qkv_bias=True)


def qwen3(config: ModelConfig) -> Traits:
    """Describe `Qwen3ForCausalLM`: no biases, norms on the heads of q and k."""
    bias = config.flag("attention_bias")
    return replace(qwen2(config), qkv_bias=bias, output_bias=bias, head_norms=True)


def qwen3_moe(config: ModelConfig) -> Traits:
    """Describe `Qwen3MoeForCausalLM`: as Qwen3, most layers with experts."""
    hidden, intermediate = config.count("hidden_size"), config.count("moe_intermediate_size")
    num_experts = config.optional_count("num_experts") or config.count("num_local_experts")
    every = config.count("decoder_sparse_step", 1)
    dense = config.indices("mlp_only_layers")
    window = config.optional_count("sliding_window") if config.flag("use_sliding_window") else None

    def moe(layer: int, prefix: str, norm: VectorSpec) -> MoeSpec | None:
        if layer in dense or (layer + 1) % every:
            return None
        return MoeSpec(
            norm=norm,
            router=VectorSpec(f"{prefix}.mlp.gate.weight", (num_experts, hidden)),
            experts=tuple(
                gate_up_down(f"{prefix}.mlp.experts.{expert}", hidden, intermediate) for expert in range(num_experts)
            ),
            top_k=config.count("num_experts_per_tok"),
            normalize=config.flag("norm_topk_prob"),
        )

    return replace(qwen3(config), window=lambda layer: window, moe=moe)


def _window(config: ModelConfig) -> Callable[[int], int | None]:
    """Return the layers with a sliding window: those listed in the config, or those above `max_window_layers`."""
    window = config.optional_count("sliding_window") if config.flag("use_sliding_window") else None
    types = config.layer_types(config.count("num_hidden_layers"))
    first = config.index("max_window_layers", 0)

    def of(layer: int) -> int | None:
        slides = layer >= first if types is None else types[layer] == "sliding_attention"
        return window if slides else None

    return of


_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6
"""By default, every sixth layer has full attention."""


def gemma3(config: ModelConfig) -> Traits:
    """Describe `Gemma3ForCausalLM`: sliding layers with a separate rope, norms before and after each block."""
    config.refuse("use_bidirectional_attention", "a decoder attends only to earlier tokens")
    num_layers = config.count("num_hidden_layers")
    types = config.layer_types(num_layers)
    if types is None:
        pattern = config.count("sliding_window_pattern", _PATTERN)
        types = tuple(f"{'sliding' if (layer + 1) % pattern else 'full'}_attention" for layer in range(num_layers))
    full, sliding = _ropes(config)
    window = config.count("sliding_window")
    bias = config.flag("attention_bias")
    return Traits(
        rope=lambda layer: sliding if types[layer] == "sliding_attention" else full,
        window=lambda layer: window if types[layer] == "sliding_attention" else None,
        scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        head_norms=True,
        sandwich_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(config.count("hidden_size")),
        tied=True,
        activation="hidden_activation",
        attention_softcap=config.optional_number("attn_logit_softcapping"),
        softcap=config.optional_number("final_logit_softcapping"),
    )


def _ropes(config: ModelConfig) -> tuple[RopeSpec, RopeSpec]:
    """Return the ropes of full-attention layers and of sliding layers, from either config format."""
    head_dim = head_dim_of(config)
    parameters = config.part("rope_parameters")
    if parameters is None:
        scaling = config.part("rope_scaling")
        theta = config.number("rope_theta", _GLOBAL_THETA)
        local_theta = config.number("rope_local_base_freq", _LOCAL_THETA)
        return (
            scaled_rope_spec(config, scaling, head_dim, theta=theta),
            scaled_rope_spec(config, None, head_dim, theta=local_theta),
        )
    if "rope_theta" in parameters.values:
        raise ModelError(f"{config.origin}: rope_parameters must name full_attention and sliding_attention")
    return (
        scaled_rope_spec(config, parameters.part("full_attention"), head_dim, theta=_GLOBAL_THETA),
        scaled_rope_spec(config, parameters.part("sliding_attention"), head_dim, theta=_LOCAL_THETA),
    )


def ernie(config: ModelConfig) -> Traits:
    """Describe `Ernie4_5ForCausalLM`: rope rotates adjacent elements; one flag adds a bias to every linear."""
    rope = rope_spec(config, head_dim_of(config), theta=500_000.0, interleaved=True)
    bias = config.flag("use_bias")
    return Traits(
        rope=lambda layer: rope, qkv_bias=bias, output_bias=bias, mlp_bias=bias, tied=True, ignored=(r"^model\.mtp_",)
    )


def ernie_moe(config: ModelConfig) -> Traits:
    """Describe `Ernie4_5_MoeForCausalLM`: the first layers dense, then experts with a bias on the routing scores."""
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


logger = logging.getLogger(__name__)

ARCHITECTURES: Mapping[str, Callable[[ModelConfig], Traits]] = {
    "Ernie4_5ForCausalLM": ernie,
    "Ernie4_5_ForCausalLM": ernie,
    "Ernie4_5_MoeForCausalLM": ernie_moe,
    "Gemma3ForCausalLM": gemma3,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}


_MULTIPLIERS: Final = ("num_hidden_layers", "num_experts", "num_local_experts", "moe_num_experts")
"""Fields whose value cannot exceed the number of tensors."""
_FEW_TENSORS: Final = 1000
_ROPE_BYTES: Final = 1 << 30
"""Limit in bytes of position tables, at least the size of the weights, unless the user sets a length."""


def load_model(
    checkpoint: Checkpoint,
    ops: Ops,
    max_positions: int | None = None,
    progress: ProgressSink | None = None,
    quantization: str = "auto",
) -> DecoderModel:
    """Load a checkpoint for sequences of up to `max_positions` tokens, the model's own limit if None.

    `quantization` is a format that `ops` computes, or `auto` to leave weights as they are stored.

    Raises `ModelError` if the architecture is unknown, the config is invalid or the tensors do not match it, before any
    weight is read; `ConfigError` if `max_positions` exceeds the model's limit.
    """
    spec = spec_of(checkpoint)
    if max_positions is None:
        max_positions = spec.max_positions
        pairs = sum(len(rope.inverse_frequencies) for rope in {layer.attention.rope for layer in spec.layers})
        needed = max_positions * pairs * 8
        if needed > max(_ROPE_BYTES, checkpoint.total_bytes):
            raise ModelError(
                f"{checkpoint.path}: tables of max_position_embeddings={max_positions} need {needed} bytes",
                hint="set a shorter --max-model-len",
            )
    if max_positions > spec.max_positions:
        raise ConfigError(
            f"max_model_len={max_positions} exceeds the model's context ({spec.max_positions} tokens)",
            field="max_model_len",
            hint=f"use at most {spec.max_positions}",
        )
    num_parameters = check_tensors(spec, checkpoint)
    decoder, weights = build_decoder(spec, checkpoint, ops, max_positions, progress, quantization)
    return DecoderModel(
        ops,
        spec,
        decoder,
        architecture=spec.architecture,
        vocab_size=spec.embedding.shape[0],
        max_positions=max_positions,
        eos_token_ids=checkpoint.eos_token_ids,
        num_parameters=num_parameters,
        weights=weights,
        state_size=spec.embedding.shape[1],
        generates=spec.architecture in ARCHITECTURES,
    )


def spec_of_config(path: Path) -> DecoderSpec:
    """Describe the model of a `config.json`, or of the folder with it, whose weights need not be there.

    Raises `ModelError` if it cannot be read or its architecture is unknown.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        name = values["architectures"][0]
        config = ModelConfig(values, origin=str(file))
        return decoder_spec(name, config, ARCHITECTURES[name](config))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        hint = f"use a config.json with one of the architectures {', '.join(ARCHITECTURES)}"
        raise ModelError(f"{file}: {type(error).__name__}: {error}", hint=hint) from error


def spec_of(checkpoint: Checkpoint) -> DecoderSpec:
    """Describe the model of a checkpoint's config, without reading its tensors.

    Code shipped with a checkpoint (`auto_map`) is never run. Raises `ModelError` if the architecture is unknown.
    """
    path = checkpoint.path
    config = ModelConfig(checkpoint.config, origin=str(path / "config.json" if path.is_dir() else path))
    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names else None
    traits = None
    if isinstance(name, str):
        whole = f"{name.removesuffix('Model').removesuffix(CLASSIFICATION)}ForCausalLM"
        if name not in ARCHITECTURES and whole in ARCHITECTURES:
            # The same model without its output projection: it embeds or classifies texts and cannot generate.
            config = replace(config, values={**checkpoint.config, "tie_word_embeddings": True})
        traits = ARCHITECTURES.get(name) or ARCHITECTURES.get(whole)
    if traits is None or not isinstance(name, str):
        found = "the config has no architecture" if name is None else f"unsupported architecture {str(name)[:80]!r}"
        if "auto_map" in checkpoint.config:
            found += ", and code shipped with the checkpoint (auto_map) is never run"
        raise ModelError(f"{checkpoint.path}: {found}", hint=f"supported are {', '.join(ARCHITECTURES)}")
    if "auto_map" in checkpoint.config:
        logger.warning("ignoring the code shipped with %s (auto_map); using the built-in %s", checkpoint.path, name)
    # A checkpoint that lacks only a few tensors gets an error with their names instead.
    most = 2 * len(checkpoint.names()) + _FEW_TENSORS
    for field in _MULTIPLIERS:
        if (count := config.index(field, 0)) > most:
            raise ModelError(f"{config.origin}: {field} is {count}, but there are {len(checkpoint.names())} tensors")
    described = traits(config)
    if name.endswith(CLASSIFICATION):
        described = replace(described, ignored=(*described.ignored, r"^score\.weight$"))
    return decoder_spec(name, config, described, most_tensors=most)
