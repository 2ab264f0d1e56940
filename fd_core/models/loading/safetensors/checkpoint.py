"""A Hugging Face folder: safetensors in one or many files, config.json, generation_config.json, a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import Checkpoint, TokenizerSource
from fd_core.models.loading.json_file import read_json_object
from fd_core.models.loading.mapped_file import StoredTensor
from fd_core.models.loading.safetensors.format import read_safetensors
from fd_core.models.loading.safetensors.quantized import quantized_views
from fd_core.models.loading.tokenizer_source import read_tokenizer_folder
from fd_core.ops.weights import RAW_TYPES, Weight

__all__ = ["SafetensorsCheckpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class SafetensorsCheckpoint(Checkpoint):
    """Tensors mapped from the shards that the index names, or from the one file there is."""

    def __init__(self, folder: Path) -> None:
        config = _read_config(folder)
        tensors = _open_shards(folder)
        # A model that was saved without its output projection has no `model.` before its names.
        bare = "embed_tokens.weight" in tensors
        views = quantized_views(config, str(folder / "config.json"), tensors)
        views = {f"model.{name}": view for name, view in views.items()} if bare else views
        super().__init__(folder, config, views, tensors.values())

    @cached_property
    def tokenizer(self) -> TokenizerSource:
        """The tokenizer's files, and the chat templates."""
        return read_tokenizer_folder(self.path)

    @cached_property
    def _generation_config(self) -> Mapping[str, Any]:
        path = self.path / "generation_config.json"
        return read_json_object(path) if path.is_file() else {}

    def _decoded(self, tensor: StoredTensor) -> Weight:
        raise ModelError(
            f"{tensor.file.path}: tensor {tensor.name!r} is stored as {tensor.dtype}",
            field="model",
            hint=f"supported are {', '.join(RAW_TYPES)}, and what a quantization_config in config.json describes",
        )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json", field="model")
    return read_json_object(path)


def _open_shards(folder: Path) -> dict[str, StoredTensor]:
    index = folder / _INDEX
    if index.is_file():
        return _from_index(index)
    single = folder / _SINGLE
    if not single.is_file():
        others = sorted(folder.glob("*.safetensors"))
        if len(others) != 1:
            names = ", ".join(each.name for each in others) or "none"
            raise ModelError(f"{folder} needs {_SINGLE} or {_INDEX}; safetensors found: {names}", field="model")
        single = others[0]
    return read_safetensors(single)


def _from_index(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map", field="model")
    shards = {name: _open_shard(index, name) for name in dict.fromkeys(map(str, weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in shards[str(name)]:
            raise ModelError(f"{index}: tensor {tensor!r} is not in {name}, which should hold it", field="model")
    return {tensor: shards[str(name)][tensor] for tensor, name in weight_map.items()}


def _open_shard(index: Path, name: str) -> dict[str, StoredTensor]:
    if not name.endswith(".safetensors") or name != Path(name).name or "\\" in name or "\0" in name:
        raise ModelError(
            f"{index} names the shard {name[:80]!r}; a shard is a .safetensors file beside the index", field="model"
        )
    path = index.parent / name
    if not path.is_file():
        raise ModelError(f"{index} names the shard {name}, which is not there", field="model", hint="download it again")
    return read_safetensors(path)
