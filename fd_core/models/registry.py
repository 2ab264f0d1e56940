"""Which architectures there are, and the door that loads one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from fd_core.errors import ConfigError, ModelError
from fd_core.models.build import ProgressSink, build_decoder, check_tensors
from fd_core.models.decoder import DecoderModel
from fd_core.models.families import ernie, ernie_moe, gemma3, llama, mistral, qwen2, qwen3, qwen3_moe
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.config import ModelConfig
from fd_core.models.spec import DecoderSpec, Traits, decoder_spec
from fd_core.ops.contract import Ops

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
"""Fields of which each unit needs a tensor and more."""
_FEW_TENSORS: Final = 1000
_ROPE_BYTES: Final = 1 << 30
"""Tables of positions may take as much, or as much as the weights, unless the user names a length."""


def load_model(
    checkpoint: Checkpoint,
    ops: Ops,
    max_positions: int | None = None,
    progress: ProgressSink | None = None,
    quantization: str = "auto",
) -> DecoderModel:
    """Load a checkpoint for sequences of up to `max_positions` tokens, the model's own limit if None.

    `quantization` is a format that `ops` computes, or `auto` to leave weights as they are stored.

    Raises `ModelError` if the architecture is not known, the config does not make sense or the tensors are not those
    that it asks for, all before a weight is read; `ConfigError` if `max_positions` exceeds the model's limit.
    """
    spec = spec_of(checkpoint)
    if max_positions is None:
        max_positions = spec.max_positions
        _check_tables(spec, checkpoint)
    if max_positions > spec.max_positions:
        raise ConfigError(
            f"max_model_len is {max_positions}, the model was made for {spec.max_positions} tokens",
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
        generates=not spec.architecture.endswith("Model"),
    )


def _check_tables(spec: DecoderSpec, checkpoint: Checkpoint) -> None:
    pairs = sum(len(rope.inverse_frequencies) for rope in {layer.attention.rope for layer in spec.layers})
    needed = spec.max_positions * pairs * 8
    if needed > max(_ROPE_BYTES, checkpoint.total_bytes):
        raise ModelError(
            f"{checkpoint.path}: the tables of max_position_embeddings {spec.max_positions} take {needed} bytes",
            field="model",
            hint="name a shorter length with --max-model-len",
        )


def spec_of(checkpoint: Checkpoint) -> DecoderSpec:
    """Describe the model that a checkpoint's config asks for, without looking at its tensors.

    Code that comes with a checkpoint (`auto_map`) is never run. Raises `ModelError` if the architecture is not known.
    """
    path = checkpoint.path
    config = ModelConfig(checkpoint.config, origin=str(path / "config.json" if path.is_dir() else path))
    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names else None
    traits = None
    if isinstance(name, str):
        whole = f"{name.removesuffix('Model')}ForCausalLM"
        if name not in ARCHITECTURES and whole in ARCHITECTURES:
            # The same without its output projection: it makes vectors, and its texts would mean nothing.
            config = replace(config, values={**checkpoint.config, "tie_word_embeddings": True})
        traits = ARCHITECTURES.get(name) or ARCHITECTURES.get(whole)
    if traits is None or not isinstance(name, str):
        found = "the config names no architecture" if name is None else f"architecture {str(name)[:80]!r} is not known"
        if "auto_map" in checkpoint.config:
            found += ", and code that comes with the checkpoint (auto_map) is never run"
        raise ModelError(f"{checkpoint.path}: {found}", field="model", hint=f"supported are {', '.join(ARCHITECTURES)}")
    if "auto_map" in checkpoint.config:
        logger.warning("%s names code of its own (auto_map); the built-in %s is used instead", checkpoint.path, name)
    # A checkpoint that lacks a few tensors is told which.
    most = 2 * len(checkpoint.names()) + _FEW_TENSORS
    for field in _MULTIPLIERS:
        if (count := config.index(field, 0)) > most:
            raise ModelError(
                f"{config.origin}: {field} is {count}, but there are {len(checkpoint.names())} tensors", field="model"
            )
    return decoder_spec(name, config, traits(config), most)
