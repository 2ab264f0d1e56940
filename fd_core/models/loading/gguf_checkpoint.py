"""Which GGUF tensor a Hugging Face name stands for, and what the converter did to it that has to be undone.

- llama: the rows of q and k were permuted for interleaved rope; Hugging Face's order is restored.
- gemma3: norm weights had 1 added; it is taken away, because the model adds it as Hugging Face's does.
- experts: one stacked tensor for each projection; each expert is a view of its part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import Checkpoint, TensorView
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.files import StoredTensor
from fd_core.models.loading.gguf_config import config_from
from fd_core.models.loading.gguf_format import PACKED_TYPES, read_gguf, unpack_blocks
from fd_core.models.loading.tokenizer_source import GgmlTokenizerSource, TokenizerSource
from fd_core.ops.weights import RAW_TYPES, RawTensor, Weight

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GEMMA_BLOCK = _BLOCK | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_CORRECTION = "exp_probs_b"

# Rope factors are part of the config; see `gguf_config`.
_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})
_PATTERN = re.compile(r"(?:blk\.(\d{1,5})\.)?([a-z_]+)\.(weight|bias)")


def views_of(tensors: Iterable[StoredTensor], config: Mapping[str, Any]) -> dict[str, TensorView]:
    """Return the view of every tensor by its Hugging Face name; `ModelError` for a name that is not known."""
    views: dict[str, TensorView] = {}
    for tensor in tensors:
        if tensor.name in _NOT_WEIGHTS:
            continue
        for name, view in _views(tensor, config).items():
            if name in views:
                raise ModelError(f"{tensor.file.path}: two tensors stand for {name!r}", field="model")
            views[name] = view
    return views


def _views(tensor: StoredTensor, config: Mapping[str, Any]) -> dict[str, TensorView]:
    match = _PATTERN.fullmatch(tensor.name)
    block, part, kind = match.groups() if match else (None, "", "")
    layer = f"model.layers.{int(block or 0)}"
    parts = _GEMMA_BLOCK if config["model_type"] == "gemma3_text" else _BLOCK
    if block is None and part in _TOP:
        return {f"{_TOP[part]}.{kind}": _unconverted(tensor, part, config)}
    if block is not None and part in parts:
        return {f"{layer}.{parts[part]}.{kind}": _unconverted(tensor, part, config)}
    if block is not None and part in _EXPERTS and len(tensor.shape) == 3:
        return {
            f"{layer}.mlp.experts.{index}.{_EXPERTS[part]}.{kind}": TensorView(tensor.shape[1:], tensor.part(index))
            for index in range(tensor.shape[0])
        }
    if block is not None and part == _CORRECTION and len(tensor.shape) == 1:
        name = f"{layer}.mlp.moe_statics.e_score_correction_bias"
        return {name: TensorView((1, *tensor.shape), tensor, _as_row)}
    raise ModelError(
        f"{tensor.file.path}: tensor {tensor.name!r} with shape {tensor.shape} is not known for {config['model_type']}",
        field="model",
    )


def _unconverted(tensor: StoredTensor, part: str, config: Mapping[str, Any]) -> TensorView:
    if config["model_type"] == "gemma3_text" and part.endswith("norm"):
        return TensorView(tensor.shape, tensor, _minus_one)
    if config["model_type"] == "llama" and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        if tensor.shape[0] % (2 * heads):
            raise ModelError(
                f"{tensor.file.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, which {heads} heads "
                "cannot share",
                field="model",
            )
        return TensorView(tensor.shape, tensor, rows=_unpermuted(tensor.shape[0], heads))
    return TensorView(tensor.shape, tensor)


def _as_row(stored: Weight) -> RawTensor:
    raw = stored.expanded()
    return RawTensor(raw.dtype, raw.data[np.newaxis])


def _minus_one(stored: Weight) -> RawTensor:
    return RawTensor("F32", stored.to_float32() - np.float32(1))


def _unpermuted(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """Return the order of rows that turns (pair, half) of each head back into (half, pair)."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


_EXPANDED_TYPES: Final = frozenset(
    {"Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"}
)
"""Types that are read, and have no packed form."""
SUPPORTED_TYPES: Final = (*RAW_TYPES, *PACKED_TYPES, *sorted(_EXPANDED_TYPES))

_TOKENIZER = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"


class GgufCheckpoint(Checkpoint):
    """Tensors under Hugging Face names, with what the GGUF converter did to them undone."""

    def __init__(self, path: Path) -> None:
        values, tensors = read_gguf(path)
        self._metadata = ModelConfig(values, origin=str(path))
        config = config_from(self._metadata, tensors)
        views = views_of(tensors.values(), config)
        for view in views.values():
            if view.tensor.dtype not in SUPPORTED_TYPES:
                raise ModelError(
                    f"{path}: tensor {view.tensor.name!r} is stored as {view.tensor.dtype}",
                    field="model",
                    hint=f"supported are {', '.join(SUPPORTED_TYPES)}",
                )
        super().__init__(path, config, views, tensors.values())

    @cached_property
    def tokenizer(self) -> TokenizerSource:
        """The `tokenizer.ggml.*` metadata."""
        metadata = {
            key.removeprefix(_TOKENIZER): value
            for key, value in self._metadata.values.items()
            if key.startswith(_TOKENIZER)
        }
        if not metadata:
            raise ModelError(f"{self.path} carries no tokenizer", field="model")
        named = {
            key.removeprefix(f"{_TEMPLATE}."): self._metadata.text(key, "")
            for key in self._metadata.values
            if key.startswith(f"{_TEMPLATE}.")
        }
        return GgmlTokenizerSource(self.path, metadata, self._metadata.text(_TEMPLATE, "") or None, named)

    def _decoded(self, tensor: StoredTensor) -> Weight:
        rows = math.prod(tensor.shape[:-1])
        stored = tensor.view("u1", (rows, tensor.nbytes // max(1, rows)))
        with np.errstate(invalid="ignore", over="ignore"):
            if tensor.dtype in _EXPANDED_TYPES:
                from gguf.quants import dequantize

                values = dequantize(stored, GGMLQuantizationType[tensor.dtype])
                return RawTensor("F32", _finite(values, tensor, "values").reshape(tensor.shape))
            packed = unpack_blocks(tensor.dtype, stored)
        _finite(packed.scales, tensor, "scales")
        if packed.minima is not None:
            _finite(packed.minima, tensor, "minima")
        return packed if len(tensor.shape) == 2 else RawTensor("F32", packed.to_float32().reshape(tensor.shape))


def _finite(values: NDArray[np.float32], tensor: StoredTensor, what: str) -> NDArray[np.float32]:
    """Return the values; `ModelError` unless all are finite."""
    if not np.isfinite(values).all():
        raise ModelError(
            f"{tensor.file.path}: tensor {tensor.name!r} ({tensor.dtype}) has {what} that are not finite numbers",
            field="model",
            hint="the file is damaged, or its conversion failed",
        )
    return values
