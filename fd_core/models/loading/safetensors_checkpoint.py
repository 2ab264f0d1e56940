"""A Hugging Face folder: safetensors in one or many files, config.json, generation_config.json, a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import Checkpoint, GenerationDefaults, RawTensor, TokenizerSource
from fd_core.models.loading.digest import digest_of
from fd_core.models.loading.folder_tokenizer import folder_tokenizer
from fd_core.models.loading.json_file import read_json_object
from fd_core.models.loading.safetensors_format import SafetensorsFile, read_safetensors

__all__ = ["SafetensorsCheckpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SafetensorsCheckpoint(Checkpoint):
    """Tensors mapped from the shards that the index names, or from the one file there is."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._config = _read_config(folder)
        self._home = _open_shards(folder)

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json."""
        return MappingProxyType(self._config)

    def names(self) -> Sequence[str]:
        """Return the names of the tensors, in the files' order."""
        return tuple(self._home)

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._file(name).tensors[name].shape

    def read(self, name: str) -> RawTensor:
        """Return a view of one tensor."""
        return self._file(name).read(name)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 that identifies the weights and the config."""
        return digest_of(
            self._config,
            [(each.file, [tensor.offset for tensor in each.tensors.values()]) for each in self._files()],
        )

    @cached_property
    def tokenizer(self) -> TokenizerSource:
        """The content of tokenizer.json and tokenizer_config.json."""
        return folder_tokenizer(self.path)

    @cached_property
    def generation(self) -> GenerationDefaults:
        """What generation_config.json says, and config.json where that is silent."""
        path = self.path / "generation_config.json"
        values = read_json_object(path) if path.is_file() else {}
        return GenerationDefaults(
            eos_token_ids=_token_ids(self.path, "eos_token_id", values, self._config),
            bos_token_id=_first(_token_ids(self.path, "bos_token_id", values, self._config)),
            pad_token_id=_first(_token_ids(self.path, "pad_token_id", values, self._config)),
            sampling={
                name: float(values[name])
                for name in _SAMPLING
                if isinstance(values.get(name), int | float) and not isinstance(values[name], bool)
            },
        )

    @property
    def total_bytes(self) -> int:
        """Bytes that the tensors take in the files."""
        return sum(self._home[name].tensors[name].nbytes for name in self._home)

    def close(self) -> None:
        """Forget the files."""
        for each in self._files():
            each.file.close()

    def _files(self) -> list[SafetensorsFile]:
        unique = {each.file.path.name: each for each in self._home.values()}
        return [unique[name] for name in sorted(unique)]

    def _file(self, name: str) -> SafetensorsFile:
        try:
            return self._home[name]
        except KeyError:
            raise ModelError(f"{self.path} has no tensor {name!r}", field="model") from None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json", field="model")
    config = read_json_object(path)
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise ModelError(
            f"{path}: weights quantized by {str(method)[:40]!r} are not supported in safetensors",
            field="model",
            hint="take the unquantized model or a GGUF version",
        )
    return config


def _open_shards(folder: Path) -> dict[str, SafetensorsFile]:
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
    shard = read_safetensors(single)
    return dict.fromkeys(shard.tensors, shard)


def _from_index(index: Path) -> dict[str, SafetensorsFile]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map", field="model")
    shards = {name: _open_shard(index, name) for name in dict.fromkeys(map(str, weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in shards[str(name)].tensors:
            raise ModelError(f"{index}: tensor {tensor!r} is not in {name}, which should hold it", field="model")
    return {tensor: shards[str(name)] for tensor, name in weight_map.items()}


def _open_shard(index: Path, name: str) -> SafetensorsFile:
    if not name.endswith(".safetensors") or name != Path(name).name or "\\" in name or "\0" in name:
        raise ModelError(
            f"{index} names the shard {name[:80]!r}; a shard is a .safetensors file beside the index", field="model"
        )
    path = index.parent / name
    if not path.is_file():
        raise ModelError(f"{index} names the shard {name}, which is not there", field="model", hint="download it again")
    return read_safetensors(path)


def _token_ids(folder: Path, key: str, *sources: Mapping[str, Any]) -> tuple[int, ...]:
    for source in sources:
        value = source.get(key)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
            raise ModelError(f"{folder}: {key} must be a token id or a list of them, not {str(value)[:60]!r}")
        return tuple(ids)
    return ()


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
