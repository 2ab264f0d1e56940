"""A GGUF file seen as a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import (
    WEIGHT_DTYPES,
    Checkpoint,
    GgmlTokenizerSource,
    RawTensor,
    TokenizerSource,
)
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.digest import digest_of
from fd_core.models.loading.gguf_config import config_from, token_id
from fd_core.models.loading.gguf_format import GgufTensor, read_gguf
from fd_core.models.loading.gguf_names import View, views_of

__all__ = ["SUPPORTED_TYPES", "GgufCheckpoint"]

SUPPORTED_TYPES = (*WEIGHT_DTYPES, "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

# Control tokens that end a turn; files do not always say so in their metadata.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"})
_CONTROL = 3
_TOKENIZER = "tokenizer.ggml."


class GgufCheckpoint(Checkpoint):
    """Tensors under Hugging Face names, with what the GGUF converter did to them undone.

    Quantized tensors are read as float32; F32, F16 and BF16 stay what they are, mapped where nothing has to be
    undone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = read_gguf(path)
        self._metadata = ModelConfig(self._gguf.metadata, origin=str(path))
        self._config = config_from(self._metadata, self._gguf)
        self._views = views_of(self._gguf, self._config)
        for view in self._views.values():
            if view.tensor.type_name not in SUPPORTED_TYPES:
                raise ModelError(
                    f"{path}: tensor {view.tensor.name!r} is stored as {view.tensor.type_name}",
                    field="model",
                    hint=f"supported are {', '.join(SUPPORTED_TYPES)}",
                )

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's shape in Hugging Face terms, built from the metadata."""
        return MappingProxyType(self._config)

    def names(self) -> Sequence[str]:
        """Return the Hugging Face names of the tensors, in the file's order."""
        return tuple(self._views)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._view(name).shape

    def read(self, name: str) -> RawTensor:
        """Read and dequantize one tensor."""
        view = self._view(name)
        return view.undo(self._stored(view.tensor))

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 that identifies the weights and the config."""
        offsets = [tensor.offset for tensor in self._gguf.tensors.values()]
        return digest_of(self._config, [(self._gguf.file, offsets)])

    @cached_property
    def tokenizer(self) -> TokenizerSource:
        """The `tokenizer.ggml.*` metadata."""
        metadata = {
            key.removeprefix(_TOKENIZER): value
            for key, value in self._gguf.metadata.items()
            if key.startswith(_TOKENIZER)
        }
        if not metadata:
            raise ModelError(f"{self.path} carries no tokenizer", field="model")
        return GgmlTokenizerSource(self.path, metadata, self._metadata.text("tokenizer.chat_template", "") or None)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids that the metadata names, and control tokens that end a turn."""
        named = [token_id(self._metadata, f"{_TOKENIZER}{kind}_token_id") for kind in ("eos", "eot", "eom")]
        tokens = self._metadata.strings(f"{_TOKENIZER}tokens")
        types = self._metadata.indices(f"{_TOKENIZER}token_type")
        turn_ends = [
            index
            for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _CONTROL and token in _TURN_ENDS
        ]
        ends = [each for each in named if each is not None] + turn_ends
        return tuple(dict.fromkeys(ends))

    @property
    def total_bytes(self) -> int:
        """Bytes that the tensors take in the file."""
        return sum(tensor.nbytes for tensor in self._gguf.tensors.values())

    def close(self) -> None:
        """Forget the file."""
        self._gguf.file.close()

    def _view(self, name: str) -> View:
        try:
            return self._views[name]
        except KeyError:
            raise ModelError(f"{self.path} has no tensor {name!r}", field="model") from None

    def _stored(self, tensor: GgufTensor) -> RawTensor:
        what = f"tensor {tensor.name!r}"
        file = self._gguf.file
        if tensor.type_name in WEIGHT_DTYPES:
            dtype, code = WEIGHT_DTYPES[tensor.type_name]
            return RawTensor(dtype, file.view(tensor.offset, tensor.shape, code, what))
        rows = tensor.shape[:-1]
        packed = file.view(tensor.offset, (*rows, tensor.row_bytes), "u1", what)
        return RawTensor("F32", _dequantized(packed, tensor))


def _dequantized(packed: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[np.float32]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values: NDArray[np.float32] = dequantize(packed, GGMLQuantizationType[tensor.type_name])
    return values.reshape(tensor.shape)
