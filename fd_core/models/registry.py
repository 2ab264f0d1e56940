"""Entry points that describe and load the model of a config or a checkpoint, of any installed family."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from fd_core.errors import ConfigError, FdError, ModelError
from fd_core.models.build import ProgressSink, build_decoder, build_images, check_tensors
from fd_core.models.decoder import DecoderModel
from fd_core.models.families.contract import Family
from fd_core.models.families.image_processor import ImageProcessor
from fd_core.models.families.installed import installed_families
from fd_core.models.families.spec import DecoderSpec, MoeSpec, decoder_spec
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.config import ModelConfig, text_part
from fd_core.models.loading.files import read_json_object
from fd_core.ops.contract import Ops

logger = logging.getLogger(__name__)

CLASSIFICATION: Final = ("ForSequenceClassification", "ForTokenClassification")
"""Ends of the architectures that classify texts."""
_MULTIPLIERS: Final = re.compile("^(?!.*_size$).*(layer|expert)")
"""Fields whose integers cannot exceed the number of tensors."""
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
    weight is read; `ConfigError` if `max_positions` exceeds the model's limit, or `ops` lack something that it needs.
    """
    spec = spec_of(checkpoint)
    if max_positions is None:
        max_positions = spec.max_positions
        ropes = {each.rope for each in spec.attention}
        pairs = sum(len(rope.inverse_frequencies) * (1 if rope.growth is None else 2) for rope in ropes)
        needed = max_positions * pairs * 8
        if needed > max(_ROPE_BYTES, checkpoint.total_bytes):
            raise ModelError(
                f"{checkpoint.path}: tables of max_position_embeddings={max_positions} need {needed} bytes",
                hint="set a shorter --max-model-len",
            )
    require_positions(max_positions, spec.max_positions)
    num_parameters = check_tensors(spec, checkpoint)
    _require_operations(spec, checkpoint, ops, max_positions)
    shift = None if spec.final_norm is None or not spec.causal else spec.final_norm.bias
    images = build_images(spec.images, checkpoint, ops) if spec.images is not None and ops.stage.first else None
    decoder, weights = build_decoder(spec, checkpoint, ops, max_positions, progress, quantization)
    return DecoderModel(
        ops,
        spec,
        decoder,
        architecture=spec.architecture,
        vocab_size=spec.num_ids,
        max_positions=max_positions,
        eos_token_ids=checkpoint.eos_token_ids,
        num_parameters=num_parameters,
        weights=weights,
        state_size=spec.embedding.shape[1],
        generates=spec.causal and not spec.architecture.endswith(("Model", *CLASSIFICATION)),
        state_shift=None if shift is None else checkpoint.read(shift.name).to_float32(),
        images=images,
    )


def _require_operations(spec: DecoderSpec, checkpoint: Checkpoint, ops: Ops, max_positions: int) -> None:
    """Raise `ConfigError` if a pack lacks something optional that a model needs."""
    if ops.stage.count > 1 and any(each.rope.sections for each in spec.attention):
        raise ConfigError(
            f"{checkpoint.path}: the layers of {spec.architecture} cannot be divided into stages: each turns images",
            field="--pipeline-parallel-size",
            hint="leave it out",
        )
    experts = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MoeSpec)]
    other = any(
        each.scoring != "softmax" or each.weighs_inputs or each.groups > 1 or each.weight_scale != 1 for each in experts
    )
    biased = any(each.router_bias or each.experts[0][0].bias for each in experts)
    chunks = {each.window or 0 for each in spec.attention if each.chunked}
    needed = {
        "encoders": (not spec.causal, ops.encodes),
        "encoders of images": (spec.images is not None, ops.encodes),
        "attention within chunks": (min(chunks, default=max_positions) < max_positions, ops.chunks),
        "experts with sigmoid scores, groups or factors": (other, ops.any_experts),
        "latent attention": (any(each.latent for each in spec.attention), ops.latents),
        "experts with biases": (biased, ops.biased_experts),
        "experts of some ranks": (bool(experts) and ops.parallel.expert_parallel, ops.expert_parallel),
        "attention sinks": (any(each.sinks for each in spec.attention), ops.sinks),
        "recurrent layers": (bool(spec.recurrent), ops.recurs),
        "gates of attention": (any(each.gated for each in spec.attention), ops.recurs),
    }
    for what in (what for what, (needs, has) in needed.items() if needs and not has):
        raise ConfigError(
            f"{checkpoint.path}: the {ops.name} pack does not compute {what}, which {spec.architecture} needs",
            field="--backend",
            hint="use --backend cpu",
        )


def image_processor_of(checkpoint: Checkpoint) -> ImageProcessor | None:
    """Return the image processor of a model, without reading its tensors; None if it takes no images.

    Raises `ModelError` as `spec_of`, and for settings of the processor that cannot be used.
    """
    config = config_of(checkpoint)
    family = family_of(architecture_of(config))
    config = config.filled(family.defaults, family.renamed)
    if family.images(config) is None:
        return None
    settings = ModelConfig(checkpoint.processor_config, origin=str(checkpoint.path / "preprocessor_config.json"))
    return family.image_processor(config, settings)


def require_positions(max_positions: int, most: int) -> None:
    """Raise `ConfigError` for a context that is longer than the `most` tokens of a model."""
    if max_positions > most:
        raise ConfigError(
            f"max_model_len={max_positions} exceeds the model's context ({most} tokens)",
            field="max_model_len",
            hint=f"use at most {most}",
        )


def spec_of_config(path: Path) -> DecoderSpec:
    """Describe the model of a `config.json`, or of the folder with it, whose weights need not be there.

    Raises `ModelError` if it cannot be read or its architecture is unknown.
    """
    file = path / "config.json" if path.is_dir() else path
    return describe(ModelConfig(text_part(read_json_object(file)), origin=str(file)))


def spec_of(checkpoint: Checkpoint) -> DecoderSpec:
    """Describe the model of a checkpoint's config, without reading its tensors.

    Code shipped with a checkpoint (`auto_map`) is never run. Raises `ModelError` if the architecture is unknown.
    """
    config = config_of(checkpoint)
    spec = describe(config, len(checkpoint.names()))
    if "auto_map" in config.values:
        name = spec.architecture
        logger.warning("ignoring the code shipped with %s (auto_map); using the known %s", checkpoint.path, name)
    return spec


def config_of(checkpoint: Checkpoint) -> ModelConfig:
    """Return the config of a checkpoint; errors name its file."""
    path = checkpoint.path
    return ModelConfig(checkpoint.config, origin=str(path / "config.json" if path.is_dir() else path))


def describe(config: ModelConfig, num_tensors: int | None = None) -> DecoderSpec:
    """Describe the model of a config, whose files have `num_tensors` tensors if that is known.

    Raises `ModelError` if the architecture is unknown, fields are invalid, or the tensors are too few.
    """
    name = architecture_of(config)
    family = family_of(name)
    if name not in family.architectures:
        # The same model without its output projection: it embeds or classifies texts and cannot generate.
        config = replace(config, values={**config.values, "tie_word_embeddings": True})
    config = config.filled(family.defaults, family.renamed)
    most = None if num_tensors is None else most_tensors(config, num_tensors)
    try:
        traits = family.traits(config)
        if traits.causal and name.endswith(CLASSIFICATION):
            traits = replace(traits, ignored=(*traits.ignored, r"^score\.weight$"))
        return replace(decoder_spec(name, config, traits, most_tensors=most), images=family.images(config))
    except (FdError, MemoryError):
        raise
    except Exception as error:  # a family is a plugin, and numbers may be too large or too small to compute with
        raise ModelError(
            f"{config.origin}: the config of {name} cannot be used: {type(error).__name__}: {error}"
        ) from error


def most_tensors(config: ModelConfig, num_tensors: int) -> int:
    """Return the most tensors that a model may have whose files have `num_tensors`.

    Raises `ModelError` if the config counts more layers or experts than that.
    """
    # A checkpoint that lacks only a few tensors gets an error with their names instead.
    most = 2 * num_tensors + _FEW_TENSORS
    for field, count in config.values.items():
        if isinstance(count, Mapping):
            most_tensors(replace(config, values=count), num_tensors)
        elif isinstance(count, int) and count > most and _MULTIPLIERS.search(field):
            raise ModelError(f"{config.origin}: {field} is {count}, but there are {num_tensors} tensors")
    return most


def architecture_of(config: ModelConfig) -> str:
    """Return the name of a config's architecture. Raises `ModelError` if no family serves it."""
    names = config.values.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names else None
    families = installed_families()
    if isinstance(name, str) and (name in families.architectures or _whole(name) in families.architectures):
        return name
    found = "the config has no architecture" if name is None else f"unsupported architecture {str(name)[:80]!r}"
    if "auto_map" in config.values:
        found += ", and code shipped with the checkpoint (auto_map) is never run"
    raise families.unknown(f"{config.origin}: {found}")


def family_of(name: str) -> Family:
    """Return the family of an architecture that `architecture_of` returned."""
    known = installed_families().architectures
    return known.get(name) or known[_whole(name)]


def _whole(name: str) -> str:
    """Return the name of the same architecture with an output projection."""
    return f"{name.removesuffix('Model').removesuffix(CLASSIFICATION[0])}ForCausalLM"
