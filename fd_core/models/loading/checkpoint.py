"""The contract of a checkpoint, whatever its format, and the door that opens one.

Laws that every format keeps:
1. Sizes are checked against the file before anything is allocated or mapped for a tensor.
2. What is wrong with a file is a `ModelError` that names the file, and the tensor where there is one.
3. Nothing in a checkpoint is ever executed: no pickle, no code beside the weights.
4. Names and config are Hugging Face's, so that a model is written once for every format.
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
from fd_core.models.loading.files import StoredTensor, digest_of
from fd_core.models.loading.tokenizer_source import TokenizerSource, end_tokens
from fd_core.ops.weights import RAW_TYPES, PackedTensor, RawTensor, Weight

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
PICKLE_HINT = (
    "pickled weights can run code when they are opened; take a safetensors or GGUF version of the model, or "
    "convert it where you trust the file: load it with transformers and call save_pretrained()"
)


@dataclass(frozen=True, slots=True)
class TensorView:
    """A Hugging Face tensor: its shape, the stored tensor, and what turns one into the other."""

    shape: tuple[int, ...]
    tensor: StoredTensor
    undo: Callable[[Weight], RawTensor] | None = None
    """Undoes what a converter did to the values; None where nothing is to be undone."""
    rows: npt.NDArray[np.intp] | None = None
    """Stored rows in Hugging Face's order; None where they are in it."""
    stored_format: str = ""
    """The name of the form in which several tensors are stored; empty where it is the type of `tensor`."""
    joined: Callable[[], Weight] | None = None
    """Reads a weight that several stored tensors make, of which `tensor` is one; None where it is `tensor`."""


class Checkpoint(ABC):
    """An open checkpoint: its config, its tensors by Hugging Face name, its tokenizer.

    The checkpoint owns its files. `close` forgets them; views that `read` gave out keep their own mapping alive.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], views: Mapping[str, TensorView], stored: Collection[StoredTensor]
    ) -> None:
        """`stored` is everything that lies in the files, `views` what there is of it by Hugging Face name."""
        self.path = path
        """Path that was opened: the folder or the file."""
        self.config: Mapping[str, Any] = MappingProxyType(config)
        """The model's shape in the terms of a Hugging Face config.json."""
        self._views = views
        self._stored = stored

    def names(self) -> Sequence[str]:
        """Return the Hugging Face names of the tensors, such as `model.layers.0.self_attn.q_proj.weight`."""
        return tuple(self._views)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it; `ModelError` if there is no such tensor."""
        return self._view(name).shape

    def stored_format(self, name: str) -> str:
        """Return the type in which a tensor is stored, by its format's name, such as `BF16` or `Q4_K`."""
        view = self._view(name)
        return view.stored_format or view.tensor.dtype

    def read(self, name: str) -> RawTensor:
        """Read one tensor; `ModelError` if there is none or if it is damaged.

        F32, F16 and BF16 stay what they are, mapped where nothing has to be undone; other types become float32.
        """
        return self.read_weight(name, ()).expanded()

    def read_weight(self, name: str, formats: Collection[str]) -> Weight:
        """Read the weight of a linear layer: as it was quantized if that format is among `formats`, else as `read`."""
        view = self._view(name)
        if view.joined is not None:
            stored = view.joined()
        elif (code := RAW_TYPES.get(view.tensor.dtype)) is not None:
            stored = RawTensor(view.tensor.dtype, view.tensor.view(code))
        else:
            stored = self._decoded(view.tensor)
        ordered = stored if view.rows is None else stored.take_rows(view.rows)
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
        """Tokens that end a generation, whichever file names them; ids without an embedding row are left out."""
        try:
            tokenizer = self.tokenizer
        except ModelError:  # some are used without one
            tokenizer = None
        rows = self.config.get("vocab_size")
        named = {
            str(self.path / "generation_config.json"): self._generation_config.get("eos_token_id"),
            str(self.path): self.config.get("eos_token_id"),
        }
        return end_tokens(named, tokenizer, rows if isinstance(rows, int) else None)

    @property
    def _generation_config(self) -> Mapping[str, Any]:
        """Defaults of generations that the checkpoint brings."""
        return {}

    @property
    def total_bytes(self) -> int:
        """Bytes that the weights take in the files, for progress and memory planning."""
        return sum(tensor.nbytes for tensor in self._stored)

    def close(self) -> None:
        """Forget the files; calling it again does nothing."""
        for tensor in self._stored:
            tensor.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _decoded(self, tensor: StoredTensor) -> Weight:
        """Read a tensor of a type that is only this format's; `ModelError` if it is damaged."""

    def _view(self, name: str) -> TensorView:
        try:
            return self._views[name]
        except KeyError:
            raise ModelError(f"{self.path} has no tensor {name!r}") from None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder with safetensors, config and tokenizer, or a .gguf file.

    A folder without safetensors that holds exactly one .gguf file stands for that file.
    Raises `ModelError` for anything else, for pickled weights and for damaged files.
    """
    path = Path(path)
    if not path.exists():
        raise ModelError(f"model path does not exist: {path}")
    if path.is_dir():
        return _open_folder(path)
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        from fd_core.models.loading.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    if suffix in PICKLE_SUFFIXES:
        raise ModelError(f"refused to open pickled weights: {path}", hint=PICKLE_HINT)
    if suffix == ".safetensors":
        raise ModelError(
            f"{path} holds weights only", hint="name the folder that also has config.json and tokenizer.json"
        )
    raise ModelError(f"not a model: {path}", hint="name a folder with safetensors, or a .gguf file")


def _open_folder(folder: Path) -> Checkpoint:
    files = sorted(entry for entry in folder.iterdir() if entry.is_file())
    if any(entry.suffix == ".safetensors" or entry.name.endswith(".safetensors.index.json") for entry in files):
        from fd_core.models.loading.safetensors_files import SafetensorsCheckpoint

        return SafetensorsCheckpoint(folder)
    ggufs = [entry for entry in files if entry.suffix.lower() == ".gguf"]
    if len(ggufs) == 1:
        return open_checkpoint(ggufs[0])
    if ggufs:
        names = ", ".join(entry.name for entry in ggufs)
        raise ModelError(f"{folder} holds several GGUF files: {names}", hint="name one of them")
    pickles = [entry.name for entry in files if entry.suffix.lower() in PICKLE_SUFFIXES]
    if pickles:
        raise ModelError(f"{folder} holds only pickled weights: {', '.join(pickles[:5])}", hint=PICKLE_HINT)
    raise ModelError(f"no weights in {folder}", hint="a model folder holds *.safetensors and config.json")
