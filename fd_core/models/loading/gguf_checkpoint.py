"""GGUF tensors under Hugging Face names, and the inverse of the converter's changes.

- Rows of q and k that were permuted for interleaved rope get Hugging Face's order.
- A number that was added to norm weights is subtracted, because the model adds it as Hugging Face's does.
- Keys and values of latent attention, which newer files have apart, are joined to one tensor.
- Recurrent layers: A is stored as -exp(A_log), and vectors as matrices. Heads of values may be in another order.
- Experts: one stacked tensor for each projection, of which each expert is a view of its part, or in old files one each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import Checkpoint, TensorView
from fd_core.models.loading.config import ModelConfig, PoolingMethod
from fd_core.models.loading.files import StoredTensor
from fd_core.models.loading.gguf_family import Gguf, KnownGguf, StoredTensors, config_keys
from fd_core.models.loading.gguf_format import PACKED_TYPES, packed_blocks, read_gguf
from fd_core.models.loading.tokenizer_source import GgmlTokenizerSource, TokenizerSource
from fd_core.ops.weights import RAW_TYPES, PackedTensor, RawTensor, Weight

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
}
_CORRECTION = "exp_probs_b"
_UNSUFFIXED = frozenset({"ssm_a", "ssm_d", "ssm_dt"})
"""Parts whose name at Hugging Face does not end in their kind."""
_CONVOLUTIONS = frozenset({"ssm_conv1d", "shortconv.conv"})
_SHARED_GATE = "ffn_gate_inp_shexp"
"""Some converters write its one row as a vector."""

_ROPE_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_CONFIGURED = frozenset({_ROPE_FACTORS, _SHORT_FACTORS, _LONG_FACTORS})
"""Tensors that become part of the config."""
_PATTERN = re.compile(
    r"(?:blk\.(\d{1,5})\.)?((?:shortconv\.|nextn\.)?[a-z_]+(?:1d)?)(?:\.(\d{1,5}))?(?:\.(weight|bias))?"
)


def _views(tensor: StoredTensor, config: Mapping[str, Any], gguf: Gguf) -> dict[str, TensorView]:
    match = _PATTERN.fullmatch(tensor.name)
    block, part, expert, kind = match.groups() if match else (None, "", None, None)
    kind = kind or ("weight" if part in _UNSUFFIXED else "")
    layer = f"model.layers.{int(block or 0)}"
    parts = {**_BLOCK, **gguf.tensors}
    if expert is not None:
        if block is not None and (name := parts.get(f"{part}_exps")):
            return {f"{layer}.{name.format(int(expert))}.{kind}": TensorView(tensor.shape, tensor)}
        part = ""
    if block is not None and part == _CORRECTION and tensor.shape[-1] == math.prod(tensor.shape):
        name = f"{layer}.{parts[part]}"
        shape = (1,) * ("moe_statics" in name) + tensor.shape[-1:]  # ERNIE's is a matrix
        return {name: _reshaped(tensor, shape)}
    if not kind:
        part = ""
    if block is not None and part == "ssm_ba" and (heads := config.get("linear_num_key_heads")):
        # Rows for b and a of the heads of values of each head of keys in turn.
        grouped = np.arange(tensor.shape[0] // (2 * heads) * 2 * heads).reshape(heads, 2, -1).swapaxes(0, 1)
        shape = (tensor.shape[0] // 2, *tensor.shape[1:])
        name = f"{layer}.linear_attn.in_proj"
        return {
            f"{name}_{each}.{kind}": TensorView(shape, tensor, rows=grouped[i].ravel()) for i, each in enumerate("ba")
        }
    if block is None and (name := {**_TOP, **gguf.top}.get(part)):
        return {f"{name}.{kind}": _unconverted(tensor, part, kind, config, gguf)}
    if block is not None and part in parts and "{}" not in parts[part]:
        suffix = "" if part in _UNSUFFIXED else f".{kind}"
        view = _unconverted(tensor, part, kind, config, gguf)
        return {f"{layer}.{parts[part]}{suffix}": _untiled(view, part, config) if gguf.tiled else view}
    if block is not None and part in parts and len(tensor.shape) == (3 if kind == "weight" else 2):
        return {
            f"{layer}.{parts[part].format(index)}.{kind}": TensorView(tensor.shape[1:], tensor.part(index))
            for index in range(tensor.shape[0])
        }
    if block is not None and part == "attn_sinks":
        return {f"{layer}.self_attn.sinks": TensorView(tensor.shape, tensor)}
    raise ModelError(
        f"{tensor.file.path}: tensor {tensor.name!r} of shape {tensor.shape} is unknown for {config['model_type']}"
    )


def _unconverted(tensor: StoredTensor, part: str, kind: str, config: Mapping[str, Any], gguf: Gguf) -> TensorView:
    if part in _CONVOLUTIONS and kind == "weight" and len(tensor.shape) == 2:
        return _reshaped(tensor, (tensor.shape[0], 1, tensor.shape[1]))
    if part in ("ssm_a", "ssm_d", "ssm_norm"):
        return _reshaped(tensor, (math.prod(tensor.shape),), logarithms=part == "ssm_a")
    if (offset := np.float32(gguf.norm_offset)) and part.endswith("norm") and kind == "weight":
        return TensorView(tensor.shape, tensor, lambda stored: RawTensor("F32", stored.to_float32() - offset))
    if gguf.permuted and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        if tensor.shape[0] % (2 * heads):
            raise ModelError(
                f"{tensor.file.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, which {heads} heads "
                "cannot share"
            )
        # The order of rows that turns (pair, half) of each head back into (half, pair).
        rows = np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return TensorView(tensor.shape, tensor, rows=rows)
    if part == _SHARED_GATE and len(tensor.shape) == 1:
        return TensorView((1, *tensor.shape), tensor, _as_row)
    return TensorView(tensor.shape, tensor)


_OF_VALUES: Final = frozenset({"attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out"})
_OF_VALUE_HEADS: Final = frozenset({"ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"})


def _untiled(view: TensorView, part: str, config: Mapping[str, Any]) -> TensorView:
    """Return the last rows, or the columns, of a tensor in the order of heads of values."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = config["linear_value_head_dim"] if part in _OF_VALUES else 1
    if (
        part not in _OF_VALUES | _OF_VALUE_HEADS
        or heads % keys
        or view.shape[-1 if part == "ssm_out" else 0] < heads * width
    ):
        return view
    order = np.arange(heads).reshape(-1, keys).T.ravel()
    if part == "ssm_out":
        return replace(view, columns=(order, width))
    first = view.shape[0] - heads * width
    rows = (first + order[:, np.newaxis] * width + np.arange(width)).ravel()
    return replace(view, rows=np.concatenate([np.arange(first), rows]))


def _reshaped(tensor: StoredTensor, shape: tuple[int, ...], *, logarithms: bool = False) -> TensorView:
    def changed(stored: Weight) -> RawTensor:
        values = stored.to_float32().reshape(shape)
        with np.errstate(invalid="ignore", divide="ignore"):
            return RawTensor("F32", _finite(np.log(-values), tensor, "logarithms") if logarithms else values)

    return TensorView(shape, tensor, changed)


def _as_row(stored: Weight) -> RawTensor:
    raw = stored.expanded()
    return RawTensor(raw.dtype, raw.data[np.newaxis])


_EXPANDED_TYPES: Final = frozenset(
    {"Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"}
)
"""Types that are dequantized when read and have no packed form."""
SUPPORTED_TYPES: Final = (*RAW_TYPES, *PACKED_TYPES, *sorted(_EXPANDED_TYPES))

_TOKENIZER = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SAMPLING: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Keys of llama.cpp's converter, and their names in `generation_config.json`."""


_POOLING: Final[Mapping[int, PoolingMethod | None]] = {0: None, 1: "mean", 2: "cls", 3: "last"}
_POOLING_TYPES: Final = ", ".join(f"{kind} ({method or 'unset'})" for kind, method in _POOLING.items())

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def is_later_part(name: str) -> bool:
    """Return True if a file is named as a part of a split GGUF file after the first one."""
    match = _PART.fullmatch(name)
    return match is not None and int(match.group(2)) > 1


def _read_parts(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return metadata and tensors of a file, with the tensors of the parts next to it if it is the first of several."""
    metadata, tensors = read_gguf(path)
    count, match = metadata.get("split.count", 0), _PART.fullmatch(path.name)
    if count in (0, 1):
        return metadata, tensors
    if metadata.get("split.no") != 0 or match is None or [*map(int, match.groups()[1:])] != [1, count]:
        raise ModelError(
            f"{path} is a part of a split GGUF file, but not named and numbered as the first of {count!r:.20}",
            hint="use the path of the part NAME-00001-of-..., under the name that it was written with",
        )
    for number in range(1, count):
        part = path.with_name(f"{match.group(1)}-{number + 1:05d}-of-{count:05d}{path.suffix}")
        more, found = read_gguf(part)
        if (more.get("split.no"), more.get("split.count")) != (number, count):
            raise ModelError(f"{part} is not part {number + 1} of {count}", hint="download all parts of one file")
        if twice := tensors.keys() & found.keys():
            raise ModelError(f"{part}: tensor {min(twice)!r} is in an earlier part as well")
        tensors |= found
    if (total := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise ModelError(f"{path} and its other parts have {len(tensors)} tensors, expected {total!r:.20}")
    return metadata, tensors


class GgufCheckpoint(Checkpoint):
    """GGUF checkpoint: tensors under Hugging Face names, with the converter's changes reverted."""

    def __init__(self, path: Path, known: KnownGguf) -> None:
        values, stored_tensors = _read_parts(path)
        self._metadata, tensors, predicting = _of_model(ModelConfig(values, origin=str(path)), stored_tensors)
        config, stored = config_from(self._metadata, tensors, known)
        if stored.mtp is not None:
            tensors = {**tensors, **predicting}
        after = f"model.layers.{config['num_hidden_layers']}."
        views: dict[str, TensorView] = {}
        for tensor in tensors.values():
            if tensor.name in _CONFIGURED:
                continue
            for name, view in _views(tensor, config, stored).items():
                if name.startswith(after):
                    name = _of_mtp(name.removeprefix(after), stored.mtp or {}, after)
                if name in views:
                    raise ModelError(f"{path}: two tensors map to {name!r}")
                views[name] = view
        for view in views.values():
            if view.tensor.dtype not in SUPPORTED_TYPES:
                raise ModelError(
                    f"{path}: tensor {view.tensor.name!r} is stored as {view.tensor.dtype}",
                    hint=f"supported are {', '.join(SUPPORTED_TYPES)}",
                )
        for name in [each for each in views if each.endswith(".k_b_proj.weight")]:
            layer = name.removesuffix("k_b_proj.weight")
            parts = views.pop(name), views.pop(f"{layer}v_b_proj.weight", None)
            views[f"{layer}kv_b_proj.weight"] = self._joined_heads(*parts)
        super().__init__(path, config, views, tensors.values())

    def _joined_heads(self, keys: TensorView, values: TensorView | None) -> TensorView:
        """Return the linear from the latent value to the keys, then the values, of each head."""
        shapes = keys.shape, () if values is None else values.shape
        if values is None or [*map(len, shapes)] != [3, 3] or keys.shape[:2] != (shapes[1][0], shapes[1][2]):
            raise ModelError(
                f"{keys.tensor.file.path}: tensor {keys.tensor.name!r} of shape {shapes[0]} and attn_v_b of shape "
                f"{shapes[1]} do not fit; expected (heads, rank, key) and (heads, value, rank)"
            )
        heads, rank, key = keys.shape
        stored = values.tensor

        def joined() -> RawTensor:
            up = self._stored_weight(keys.tensor).to_float32().swapaxes(1, 2)
            both = np.concatenate([up, self._stored_weight(stored).to_float32()], axis=1)
            return RawTensor("F32", both.reshape(-1, rank))

        return TensorView((heads * (key + stored.shape[1]), rank), keys.tensor, joined=joined)

    @cached_property
    def tokenizer(self) -> TokenizerSource:
        """The `tokenizer.ggml.*` metadata."""
        metadata = {
            key.removeprefix(_TOKENIZER): value
            for key, value in self._metadata.values.items()
            if key.startswith(_TOKENIZER)
        }
        if not metadata:
            raise ModelError(f"{self.path} carries no tokenizer")
        named = {
            key.removeprefix(f"{_TEMPLATE}."): self._metadata.text(key, "")
            for key in self._metadata.values
            if key.startswith(f"{_TEMPLATE}.")
        }
        return GgmlTokenizerSource(self.path, metadata, self._metadata.text(_TEMPLATE, "") or None, named)

    @property
    def config_keys(self) -> Mapping[str, str]:
        """The keys with the prefix of the architecture."""
        return config_keys(self._metadata.text("general.architecture", ""))

    @property
    def pooling(self) -> PoolingMethod | None:
        """The method of `pooling_type`."""
        key = f"{self._metadata.text('general.architecture', '')}.pooling_type"
        kind = self._metadata.values.get(key, 0)
        if isinstance(kind, bool) or kind not in _POOLING:
            hint = "choose one with --pooling"
            raise ModelError(f"{self.path}: {key} is {str(kind)[:20]}; supported are {_POOLING_TYPES}", hint=hint)
        return _POOLING[kind]

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The `general.sampling.*` metadata."""
        values = self._metadata.values
        return {name: values[key] for key, name in _SAMPLING.items() if key in values}

    def _decoded(self, tensor: StoredTensor) -> Weight:
        rows = math.prod(tensor.shape[:-1])
        stored = tensor.view("u1", (rows, tensor.nbytes // max(1, rows)))
        if tensor.dtype in _EXPANDED_TYPES:
            from gguf.quants import dequantize

            with np.errstate(invalid="ignore", over="ignore"):
                values = dequantize(stored, GGMLQuantizationType[tensor.dtype])
            return RawTensor("F32", _finite(values, tensor, "values").reshape(tensor.shape))

        def check(unpacked: PackedTensor) -> PackedTensor:
            _finite(unpacked.scales, tensor, "scales")
            if unpacked.minima is not None:
                _finite(unpacked.minima, tensor, "minima")
            return unpacked

        packed = packed_blocks(tensor.dtype, stored, check)
        return packed if len(tensor.shape) == 2 else RawTensor("F32", packed.to_float32().reshape(tensor.shape))


def _finite(values: NDArray[np.float32], tensor: StoredTensor, what: str) -> NDArray[np.float32]:
    """Return the values; `ModelError` unless all are finite."""
    if not np.isfinite(values).all():
        raise ModelError(
            f"{tensor.file.path}: tensor {tensor.name!r} ({tensor.dtype}) has {what} that are not finite numbers",
            hint="the file is damaged, or its conversion failed",
        )
    return values


_NO_TOKEN = 0xFFFFFFFF


def token_id(metadata: ModelConfig, key: str) -> int | None:
    """Return a token id, or None if the key is absent or marks it as unset."""
    return None if metadata.values.get(key) in (None, _NO_TOKEN) else metadata.index(key, 0)


_OF_LAYERS: Final = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Metadata that may list a number for each layer: the same for all, or 0 for those without."""


def _of_mtp(name: str, named: Mapping[str, str], after: str) -> str:
    """Return the name of a tensor of the block for multi-token prediction, see `Gguf.mtp`."""
    found = next((begin for begin in named if name.startswith(begin)), None)
    return f"{after}{name}" if found is None else f"{named[found]}{name.removeprefix(found)}"


def _of_model(metadata: ModelConfig, tensors: StoredTensors) -> tuple[ModelConfig, StoredTensors, StoredTensors]:
    """Return metadata and tensors without the last blocks if those predict several tokens ahead, and the tensors of
    the first of these."""
    prefix = f"{metadata.text('general.architecture', '')}."
    if not (more := metadata.index(f"{prefix}nextn_predict_layers", 0)):
        return metadata, tensors, {}
    blocks = metadata.count(f"{prefix}block_count")
    if (layers := blocks - more) < 1:
        raise ModelError(f"{metadata.origin}: {more} of {blocks} blocks are for multi-token prediction")
    values = {
        key: value[:layers]
        if key.startswith(prefix) and isinstance(value, list | tuple) and len(value) == blocks
        else value
        for key, value in metadata.values.items()
    }
    blocks_of = {name: int(match.group(1) or 0) if (match := _PATTERN.match(name)) else 0 for name in tensors}
    kept = {name: tensors[name] for name, block in blocks_of.items() if block < layers}
    first = {name: tensors[name] for name, block in blocks_of.items() if block == layers}
    return replace(metadata, values=values | {f"{prefix}block_count": layers}), kept, first


def config_from(metadata: ModelConfig, tensors: StoredTensors, known: KnownGguf) -> tuple[dict[str, Any], Gguf]:
    """Return the config in Hugging Face's terms, and how tensors are stored; `ModelError` for an unknown architecture.

    Values missing in a GGUF file are llama.cpp's constants for the architecture.
    """
    path = metadata.origin
    kind = metadata.text("general.type", "model")
    if kind != "model":
        raise ModelError(f"{path} holds a {kind}, not a whole model")
    name = metadata.text("general.architecture", "")
    if name not in known:
        raise ModelError(
            f"{path}: architecture {name!r} is not supported", hint=f"supported in GGUF are {', '.join(sorted(known))}"
        )
    architecture, model_type, stored = known[name]
    prefix = f"{name}."
    if not metadata.flag(f"{prefix}attention.causal", True):
        raise ModelError(f"{path}: {prefix}attention.causal is false, but a decoder attends only to earlier tokens")
    own = {key.removeprefix(prefix): value for key, value in metadata.values.items() if key.startswith(prefix)}
    for key in _OF_LAYERS:
        listed = own.get(key)
        if isinstance(listed, list | tuple):
            layers = ModelConfig(own, prefix, path).count("block_count")
            if len(listed) != layers or {*map(type, listed)} != {int}:
                raise ModelError(f"{path}: {prefix}{key} must be an integer, or list one for each of {layers} layers")
            if 0 not in listed and len({*listed}) > 1:
                raise ModelError(f"{path}: {prefix}{key} differs between layers: {str(listed)[:60]}")
            own |= {key: max(listed), f"{key}.layers": listed}
    shape = ModelConfig(own, prefix, metadata.origin)
    config = _common(shape, tensors) | {"architectures": [architecture], "model_type": model_type}
    for kind in ("bos", "eos"):
        config[f"{kind}_token_id"] = token_id(metadata, f"tokenizer.ggml.{kind}_token_id")
    return config | stored.config(shape, tensors), stored


def _common(shape: ModelConfig, tensors: StoredTensors) -> dict[str, Any]:
    heads = shape.count("attention.head_count")
    hidden = shape.count("embedding_length")
    head_dim = shape.count("attention.key_length", hidden // heads)
    found = shape.count("attention.value_length", head_dim)
    if found != head_dim and "blk.0.attn_kv_a_mqa.weight" not in tensors:
        raise ModelError(
            f"{shape.origin}: {shape.prefix}attention.value_length is {found} and the head size {head_dim}; "
            "only equal values are supported"
        )
    rotary = shape.count("rope.dimension_count", head_dim)
    layer_norm = shape.optional_single("attention.layer_norm_epsilon")
    rms_norm = shape.single("attention.layer_norm_rms_epsilon", layer_norm)
    layers = shape.count("block_count")
    if layers > len(tensors):
        raise ModelError(f"{shape.origin}: {shape.prefix}block_count is {layers}, but there are {len(tensors)} tensors")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{shape.origin} has no usable tensor 'token_embd.weight'")
    return {
        "hidden_size": hidden,
        "intermediate_size": shape.count("feed_forward_length", shape.optional_count("expert_feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": shape.count("context_length"),
        "rms_norm_eps": rms_norm,
        **dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps"), layer_norm or rms_norm),
        "rope_theta": shape.single("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(shape, tensors, rotary),
        "partial_rotary_factor": math.nextafter(rotary / head_dim, 1.0),  # its product with head_dim is rounded down
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _rope_scaling(shape: ModelConfig, tensors: StoredTensors, rotary: int) -> dict[str, Any] | None:
    """Return the scaling as llama.cpp reads it: it is linear unless the file names another type."""
    kind, original = shape.text("rope.scaling.type", "linear"), shape.index("rope.scaling.original_context_length", 0)
    older, amplitude = shape.optional_single("rope.scale_linear"), shape.optional_single("rope.scaling.attn_factor")
    factor = (shape.optional_single("rope.scaling.factor") or older or 1.0) if kind != "none" else 1.0
    scaling: dict[str, Any] = {"original_max_position_embeddings": original} if original else {}
    for short, long in ((_ROPE_FACTORS, _ROPE_FACTORS), (_SHORT_FACTORS, _LONG_FACTORS)):
        if short in tensors and long in tensors:
            if kind == "yarn":
                raise ModelError(f"{shape.origin}: rope scaling 'yarn' with a tensor {short!r} is not supported")
            # The converter computes those of Llama 3 for every frequency; they are the same in any context.
            return scaling | {
                "rope_type": "longrope",
                "short_factor": _rope_factors(tensors[short], rotary, factor),
                "long_factor": _rope_factors(tensors[long], rotary, factor),
                "attention_factor": amplitude or 1.0,
            }
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{shape.origin}: rope scaling {kind!r} is not supported")
    if (amplitude or 1.0) != 1.0:
        raise ModelError(
            f"{shape.origin}: {shape.prefix}rope.scaling.attn_factor is {amplitude}; other values than 1 are supported "
            f"with the tensors {_SHORT_FACTORS!r} and {_LONG_FACTORS!r} alone"
        )
    if kind == "yarn":
        scaling |= {name: shape.optional_single(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        if (slope := shape.optional_single("rope.scaling.yarn_log_multiplier")) is not None:
            # The converter writes a tenth of `mscale_all_dim`; llama.cpp takes both to be equal.
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), 10.0 * slope)
    return None if factor == 1.0 else scaling | {"rope_type": kind, "factor": factor}


def _rope_factors(tensor: StoredTensor, rotary: int, factor: float) -> list[float]:
    if tensor.dtype != "F32" or tensor.shape != (rotary // 2,):
        raise ModelError(
            f"{tensor.file.path}: tensor {tensor.name!r} has no usable form: it is {tensor.dtype} of shape "
            f"{tensor.shape}, expected F32 of shape {(rotary // 2,)}"
        )
    return [factor * float(each) for each in tensor.view("<f4")]
