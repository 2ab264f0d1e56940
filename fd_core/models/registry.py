"""Entry points that describe and load the model of a config or a checkpoint, of any installed family."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from fd_core.errors import ConfigError, FdError, ModelError
from fd_core.models.build import ProgressSink, Reader, build_decoder, build_images, build_mtp, check_tensors
from fd_core.models.decoder import DecoderModel, DraftHead
from fd_core.models.families.contract import Family
from fd_core.models.families.image_processor import ImageProcessor
from fd_core.models.families.installed import installed_families
from fd_core.models.families.spec import (
    DecoderSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    VectorSpec,
    attention_shares,
    decoder_spec,
)
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.config import ModelConfig, text_part
from fd_core.models.loading.files import read_json_object
from fd_core.models.opening import open_checkpoint
from fd_core.ops.contract import Array, Ops
from fd_core.ops.weights import summed_uses

logger = logging.getLogger(__name__)

CLASSIFICATION: Final = ("ForSequenceClassification", "ForTokenClassification")
"""Ends of the architectures that classify texts."""
_MULTIPLIERS: Final = re.compile("^(?!.*_size$).*(layer|expert)")
"""Fields whose integers cannot exceed the number of tensors."""
_FEW_TENSORS: Final = 1000
_FLAG: Final = "--speculative-config"
_OTHERS: Final = "use ngram, suffix or draft_model"
_HEAD: Final = "lm_head.weight"
_HIDDEN_NORM: Final = "model.layers.0.hidden_norm"
_OF_HEADS: Final = (r"^fc\.weight$", "^d2t$", "^t2d$", r"\.hidden_norm\.weight$")
"""Tensors of draft heads besides those of a decoder of one layer."""
_ENCODERS_OF_IMAGES: Final = "encoders of images"
_TEXTS_ONLY: Final = "serve only texts with --language-model-only"
_ROPE_BYTES: Final = 1 << 30
"""Limit in bytes of position tables, at least the size of the weights, unless the user sets a length."""


def load_model(
    checkpoint: Checkpoint,
    ops: Ops,
    max_positions: int | None = None,
    progress: ProgressSink | None = None,
    quantization: str = "auto",
    *,
    texts_only: bool = False,
) -> DecoderModel:
    """Load a checkpoint for sequences of up to `max_positions` tokens, the model's own limit if None.

    `quantization` is a format that `ops` computes, or `auto` to leave weights as they are stored. With `texts_only`,
    an encoder of images is not loaded.

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
            name = config_of(checkpoint).name_of("max_position_embeddings")
            raise ModelError(
                f"{checkpoint.path}: tables of {name}={max_positions} need {needed} bytes",
                hint="set a shorter --max-model-len",
            )
    require_positions(max_positions, spec.max_positions)
    num_parameters = check_tensors(spec, checkpoint)
    if texts_only:
        spec = _of_texts(spec)
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


def _of_texts(spec: DecoderSpec) -> DecoderSpec:
    """Return a model without its encoder of images, and without experts that only tokens of images use."""
    layers = (
        replace(layer, feed_forward=replace(layer.feed_forward, images=None))
        if isinstance(layer.feed_forward, MoeSpec)
        else layer
        for layer in spec.layers
    )
    return replace(spec, images=None, layers=tuple(layers))


def _require_operations(spec: DecoderSpec, checkpoint: Checkpoint, ops: Ops, max_positions: int) -> None:
    """Raise `ConfigError` if a pack lacks something optional that a model needs."""
    whole = spec.images is not None and spec.images.whole
    placed = spec.images is not None and any(each.rope.coordinates for each in spec.attention)
    if ops.stage.count > 1 and (whole or placed):
        raise ConfigError(
            f"{checkpoint.path}: the layers of {spec.architecture} cannot be divided into stages: each reads images",
            field="--pipeline-parallel-size",
            hint=f"leave it out, or {_TEXTS_ONLY}",
        )
    blocks = [layer.feed_forward for layer in spec.layers]
    experts = [each for block in blocks if isinstance(block, MoeSpec) for each in block.kinds]
    other = any(
        each.scoring != "softmax" or each.weighs_inputs or each.groups > 1 or each.weight_scale != 1 for each in experts
    )
    biased = any(each.router_bias or each.experts[0][0].bias for each in experts)
    chunks = {each.window or 0 for each in spec.attention if each.chunked}
    needed = {
        "encoders": (not spec.causal, ops.encodes),
        _ENCODERS_OF_IMAGES: (spec.images is not None, ops.encodes),
        "attention within chunks": (min(chunks, default=max_positions) < max_positions, ops.chunks),
        "experts with sigmoid scores, groups or factors": (other, ops.any_experts),
        "latent attention": (any(each.latent for each in spec.attention), ops.latents),
        "experts with biases": (biased, ops.biased_experts),
        "experts without a gate": (any(not each.gated for each in experts), ops.ungated_experts),
        # A step is queued before the ids of its last tokens, which choose the experts, are on the host.
        "experts for images": (any(isinstance(each, MoeSpec) and each.images for each in blocks), not ops.queues),
        "experts of some ranks": (bool(experts) and ops.parallel.expert_parallel, ops.expert_parallel),
        "attention sinks": (any(each.sinks for each in spec.attention), ops.sinks),
        "recurrent layers": (bool(spec.recurrent), ops.recurs),
        "gates of attention": (any(each.gated for each in spec.attention), ops.recurs),
    }
    for what in (what for what, (needs, has) in needed.items() if needs and not has):
        raise ConfigError(
            f"{checkpoint.path}: the {ops.name} pack does not compute {what}, which {spec.architecture} needs",
            field="--backend",
            hint="use --backend cpu" + (f", or {_TEXTS_ONLY}" if what == _ENCODERS_OF_IMAGES else ""),
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
    """Describe the model of a checkpoint. Of its tensors, only an output projection is read that should be tied.

    Code shipped with a checkpoint (`auto_map`) is never run. Raises `ModelError` if the architecture is unknown.
    """
    config = config_of(checkpoint)
    spec = describe(config, len(checkpoint.names()))
    if spec.causal and spec.head is None and _HEAD in checkpoint.names():
        own = describe(replace(config, values={**config.values, "tie_word_embeddings": False}))
        if own.head is not None and _differ(checkpoint, spec.embedding.name, _HEAD):
            logger.warning(
                "%s: tie_word_embeddings is true, but %s differs from the embedding; using it, as transformers does",
                config.origin,
                _HEAD,
            )
            spec = own
    if "auto_map" in config.values:
        name = spec.architecture
        logger.warning("ignoring the code shipped with %s (auto_map); using the known %s", checkpoint.path, name)
    return spec


def _differ(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Return True if two tensors of the same type and shape have different values."""
    if one not in checkpoint.names() or any(
        read(one) != read(other) for read in (checkpoint.stored_format, checkpoint.shape)
    ):
        return False
    return any(
        not np.array_equal(first.data, second.data)
        for first, second in zip(checkpoint.read(one).blocks(), checkpoint.read(other).blocks(), strict=True)
    )


def config_of(checkpoint: Checkpoint) -> ModelConfig:
    """Return the config of a checkpoint; errors name its file."""
    path = checkpoint.path
    origin = str(path / "config.json" if path.is_dir() else path)
    return ModelConfig(checkpoint.config, origin=origin, keys=checkpoint.config_keys)


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
            raise ModelError(
                f"{config.origin}: {config.name_of(field)} is {count}, but there are {num_tensors} tensors"
            )
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


def with_draft_head(model: object, path: Path) -> DecoderModel:
    """Return the same model with the head of the checkpoint at `path`. Raises `ConfigError` or `ModelError`."""
    target = _require_decoder(model)
    try:
        with open_checkpoint(path) as checkpoint:
            checkpoint.rename(_usual_name)
            return replace(target, draft_head=_load(target, checkpoint))
    except (ConfigError, ModelError) as error:
        raise type(error)(f"draft head: {error.message}", field=_FLAG, hint=error.hint) from error


def with_mtp_layer(model: object, path: Path, quantization: str = "auto") -> DecoderModel:
    """Return the model at `path` with its layer for multi-token prediction, quantized as `load_model` has it.

    Raises `ConfigError` or `ModelError`.
    """
    target = _require_decoder(model)
    with open_checkpoint(path) as checkpoint:
        config = config_of(checkpoint)
        family = family_of(architecture_of(config))
        spec = family.mtp(config.filled(family.defaults, family.renamed))
        if spec is None or not {*checkpoint.names()}.intersection(name for name, _ in spec.inputs.tensors()):
            raise ConfigError(
                f"{path}: the checkpoint has no layer for multi-token prediction (MTP)", field=_FLAG, hint=_OTHERS
            )
        head, weights = build_mtp(spec, target, checkpoint, quantization)
        return replace(target, draft_head=head, weights=summed_uses([target.weights, weights]))


def _require_decoder(model: object) -> DecoderModel:
    if isinstance(model, DecoderModel) and model.causal and model.images is None:
        return model
    raise ConfigError(
        "drafts from hidden states need a decoder that fd_core computes and that takes no images",
        field=_FLAG,
        hint=_OTHERS,
    )


def tapped_layers(config: ModelConfig, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers before which its residual stream is read, in ascending order."""
    part = config.part("eagle_config")
    name = "eagle_aux_hidden_state_layer_ids"
    if part is not None and name in part.values:  # of layers after which it is read
        layers = tuple(each + 1 for each in part.indices(name))
    else:
        layers = config.indices(name) or (2, num_layers // 2, num_layers - 3)
    if len({*layers}) < len(layers) or not all(0 <= each <= num_layers for each in layers):
        raise ModelError(f"{config.origin}: {name} is {[*layers]}, but the target has {num_layers} layers")
    return tuple(sorted(layers))


def _usual_name(name: str) -> str:
    """Return the name of a tensor as in a decoder of one layer."""
    name = name.removeprefix("model.")
    for prefix in ("midlayer.", "layers.0."):
        if name.startswith(prefix):
            return f"model.layers.0.{name.removeprefix(prefix)}"
    return f"model.{name}" if name in ("norm.weight", "embed_tokens.weight") else name


def _load(model: DecoderModel, checkpoint: Checkpoint) -> DraftHead:
    ops, target, given = model.ops, model.spec, config_of(checkpoint)
    vocab = given.count("draft_vocab_size", given.count("vocab_size"))
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    described = describe(replace(given, values={**given.values, **fields}))
    spec = _of_head(described, checkpoint)
    hidden, first = target.embedding.shape[1], target.attention[0]
    attention, mlp = spec.attention[0], spec.layers[0].feed_forward
    if spec.embedding.shape[1] != hidden or not isinstance(mlp, MlpSpec) or attention.norm is None:
        raise ModelError(f"its hidden size is {spec.embedding.shape[1]}, but the target's is {hidden}")
    sizes, found = ((each.num_kv_heads, each.head_dim) for each in (first, attention))
    if first.latent is not None or target.recurrent or sizes != found:
        kind = "of another kind" if first.latent is not None or target.recurrent else f"{sizes[0]} x {sizes[1]}"
        raise ConfigError(
            f"its KV heads are {found[0]} x {found[1]} elements and share blocks with the target's, which are {kind}",
            hint="use a head with the target's KV heads, or ngram, suffix or draft_model",
        )
    check_tensors(spec, checkpoint)
    layers = tapped_layers(given, len(target.layers))
    wide = (hidden, len(layers) * hidden)
    if checkpoint.shape("fc.weight") != wide:
        raise ModelError(f"fc.weight has shape {checkpoint.shape('fc.weight')}, expected {wide}")
    reader = Reader(spec, checkpoint, ops, model.max_positions, progress=None, quantization="auto")
    rows, columns = attention_shares(attention, ops.parallel)
    fc, qkv = checkpoint.read("fc.weight"), reader.weights(attention.qkv, rows)

    def part(index: int) -> slice:
        return slice(index * hidden, (index + 1) * hidden)

    biases = reader.biases(attention.qkv, rows)
    own = spec.embedding.name in checkpoint.names()
    return DraftHead(
        ops=ops,
        taps={layer: ops.prepare_linear([fc.take_columns(part(index))]) for index, layer in enumerate(layers)},
        table=reader.table(tied=False) if own else model.decoder.embedding,
        table_scale=1.0 if own else model.decoder.embedding_scale,
        embedding_norm=reader.norm(attention.norm),
        hidden_norm=reader.norm(NormSpec(VectorSpec(f"{_HIDDEN_NORM}.weight", (hidden,)))),
        qkv=(
            ops.prepare_linear([each.take_columns(part(0)) for each in qkv], biases),
            ops.prepare_linear([each.take_columns(part(1)) for each in qkv]),
        ),
        heads=reader.heads(attention),
        output=reader.linear(attention.output, columns, adds=True),
        mlp=reader.mlp(mlp),
        activation=spec.activation,
        norm=reader.norm(spec.final_norm or attention.norm),
        head=ops.prepare_linear([reader.read_weight("lm_head.weight")]),
        ids=_token_ids(checkpoint, vocab, model),
        adds_normed=given.flag("norm_before_residual"),
    )


def _of_head(spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderSpec:
    """Return the spec of the head's tensors: the first linear has two inputs, and the embedding may be the target's."""
    (layer,), (attention,), table = spec.layers, spec.attention, spec.embedding
    attention = replace(attention, qkv=replace(attention.qkv, ins=2 * table.shape[1]))
    layer = replace(layer, attention=attention)
    if table.name not in checkpoint.names():
        table = VectorSpec("", table.shape)
    else:
        table = VectorSpec(table.name, checkpoint.shape(table.name))
    return replace(
        spec, architecture="EAGLE-3 head", embedding=table, layers=(layer,), ignored=(*spec.ignored, *_OF_HEADS)
    )


def _token_ids(checkpoint: Checkpoint, vocab: int, model: DecoderModel) -> Array | None:
    """Return the token ids of the draft vocabulary, which files hold as offsets; None if it is the target's."""
    if "d2t" not in checkpoint.names():
        if vocab != model.vocab_size:
            raise ModelError(f"it drafts {vocab} tokens of {model.vocab_size}, but has no tensor d2t")
        return None
    ids = checkpoint.read_integers("d2t").reshape(-1) + np.arange(vocab)
    if ids.min() < 0 or ids.max() >= model.vocab_size:
        raise ModelError(f"d2t names token {int(ids.max())}, but the target has {model.vocab_size} tokens")
    return model.ops.from_host(ids.astype(np.int32))
