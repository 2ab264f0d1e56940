"""A GGUF file seen as a Hugging Face checkpoint."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import Checkpoint, GgmlTokenizerSource, TokenizerSource
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.gguf.blocks import PACKED_TYPES, unpack_blocks
from fd_core.models.loading.gguf.config import config_from
from fd_core.models.loading.gguf.format import read_gguf
from fd_core.models.loading.gguf.names import views_of
from fd_core.models.loading.mapped_file import StoredTensor
from fd_core.ops.weights import RAW_TYPES, RawTensor, Weight

__all__ = ["SUPPORTED_TYPES", "GgufCheckpoint"]

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
