"""Contract of a checkpoint of any format.

Invariants of every format:
1. Sizes are checked against the file before anything is allocated or mapped for a tensor.
2. Errors in a file raise `ModelError` with the file and, if applicable, the tensor.
3. Nothing in a checkpoint is ever executed: no pickle, no code shipped with the weights.
4. Names and config are those of Hugging Face, so a model is written once for all formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fd_core.errors import ModelError
from fd_core.models.loading.config import PoolingMethod
from fd_core.models.loading.files import MappedFile, StoredTensor, digest_of
from fd_core.models.loading.tokenizer_source import TokenizerSource, end_tokens
from fd_core.ops.weights import RAW_TYPES, PackedTensor, RawTensor, Weight


@dataclass(frozen=True, slots=True)
class TensorView:
    """A Hugging Face tensor: shape, stored tensor, and the conversion between them."""

    shape: tuple[int, ...]
    tensor: StoredTensor
    undo: Callable[[Weight], RawTensor] | None = None
    """Reverts the converter's change of the values; None without one."""
    rows: npt.NDArray[np.intp] | None = None
    """Permutation of stored rows into Hugging Face's order; None if they are in order."""
    columns: tuple[npt.NDArray[np.intp], int] | None = None
    """Permutation of blocks of stored columns, and their width; None if they are in order."""
    stored_format: str = ""
    """Name of a format of several stored tensors; empty if it is the dtype of `tensor`."""
    joined: Callable[[], Weight] | None = None
    """Reads a weight composed of several stored tensors, one of them `tensor`; None if it is `tensor` alone."""


class Checkpoint(ABC):
    """An open checkpoint: its config, its tensors by Hugging Face name, its tokenizer.

    The checkpoint owns its files. `close` releases them; views returned by `read` hold their mapping.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], views: Mapping[str, TensorView], stored: Collection[StoredTensor]
    ) -> None:
        """`stored` are all tensors of the files, `views` the tensors by Hugging Face name."""
        self.path = path
        """Path that was opened: the folder or the file."""
        self.config: Mapping[str, Any] = MappingProxyType(config)
        """The model's config in the format of a Hugging Face config.json."""
        self._views = views
        self._stored = stored

    def names(self) -> Sequence[str]:
        """Return the Hugging Face names of the tensors, such as `model.layers.0.self_attn.q_proj.weight`."""
        return tuple(self._views)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it; `ModelError` if there is no such tensor."""
        return self._view(name).shape

    def stored_format(self, name: str) -> str:
        """Return the stored type of a tensor, under the name of its format, such as `BF16` or `Q4_K`."""
        view = self._view(name)
        return view.stored_format or view.tensor.dtype

    def read(self, name: str) -> RawTensor:
        """Read one tensor; `ModelError` if it is missing or damaged.

        F32, F16 and BF16 keep their dtype, mapped unless a conversion applies; other types become float32.
        """
        return self.read_weight(name, ()).expanded()

    def read_integers(self, name: str) -> npt.NDArray[np.int64]:
        """Read a tensor of 64-bit integers; `ModelError` if it is of another type."""
        tensor = self._view(name).tensor
        if tensor.dtype != "I64":
            raise ModelError(f"{self.path}: tensor {name!r} is stored as {tensor.dtype}, expected I64")
        return tensor.view("<i8")

    def rename(self, change: Callable[[str], str]) -> None:
        """Change the names of all tensors."""
        self._views = {change(name): view for name, view in self._views.items()}

    def read_weight(self, name: str, formats: Collection[str]) -> Weight:
        """Read the weight of a linear layer: packed if its format is in `formats`, else as `read`."""
        view = self._view(name)
        stored = self._stored_weight(view.tensor) if view.joined is None else view.joined()
        ordered = stored if view.rows is None else stored.take_rows(view.rows)
        ordered = ordered if view.columns is None else ordered.order_columns(*view.columns)
        weight = ordered if view.undo is None else view.undo(ordered)
        return weight if isinstance(weight, PackedTensor) and weight.format in formats else weight.expanded()

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 that identifies the weights and the config; see `digest.digest_of` for what it covers."""
        return digest_of(dict(self.config), self._stored)

    @property
    @abstractmethod
    def tokenizer(self) -> TokenizerSource:
        """Source from which `fd_core.text.load_tokenizer` builds the tokenizer; `ModelError` if there is none."""

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, from any file; ids without an embedding row are dropped."""
        try:
            tokenizer = self.tokenizer
        except ModelError:  # some are used without one
            tokenizer = None
        rows = self.config.get("vocab_size")
        named = {
            str(self.path / "generation_config.json"): self.generation_config.get("eos_token_id"),
            str(self.path): self.config.get("eos_token_id"),
        }
        return end_tokens(named, tokenizer, rows if isinstance(rows, int) else None)

    @property
    def config_keys(self) -> Mapping[str, str]:
        """Keys of the file that fields of `config` were converted from; empty for a config.json."""
        return {}

    @property
    def pooling(self) -> PoolingMethod | None:
        """Pooling of embeddings that the file itself states; None if it states none."""
        return None

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Sampling parameters that the authors recommend, under the names of `generation_config.json`."""
        return {}

    @property
    def processor_config(self) -> Mapping[str, Any]:
        """Settings of the image processor, under the names of `preprocessor_config.json`."""
        return {}

    @property
    def total_bytes(self) -> int:
        """Bytes of the weights in the files, for progress and memory planning."""
        return sum(tensor.nbytes for tensor in self._stored)

    @cached_property
    def _files(self) -> Collection[MappedFile]:
        return {tensor.file for tensor in self._stored}

    def release(self) -> None:
        """Unload the pages of the files that were read; weights that were read stay valid."""
        for file in self._files:
            file.release()

    def close(self) -> None:
        """Release the files; idempotent."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored_weight(self, tensor: StoredTensor) -> Weight:
        code = RAW_TYPES.get(tensor.dtype)
        return self._decoded(tensor) if code is None else RawTensor(tensor.dtype, tensor.view(code))

    @abstractmethod
    def _decoded(self, tensor: StoredTensor) -> Weight:
        """Read a tensor of a format-specific type; `ModelError` if it is damaged."""

    def _view(self, name: str) -> TensorView:
        try:
            return self._views[name]
        except KeyError:
            raise ModelError(f"{self.path} has no tensor {name!r}") from None
