"""The safetensors container: the header is checked against the file, tensors are mapped.

The `safetensors` package is not used to read: without a framework it rejects bfloat16 (numpy has no such type) and
copies every tensor, where this reader returns views of the mapped file.

Source: https://github.com/huggingface/safetensors#format. A file is 8 bytes of header length, a JSON header and a
buffer that the tensors cover without gaps or overlaps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import Checkpoint, TensorView
from fd_core.models.loading.config import text_part
from fd_core.models.loading.files import MappedFile, StoredTensor, read_json_object
from fd_core.models.loading.quantized_tensors import quantized_views
from fd_core.models.loading.tokenizer_source import TokenizerSource, read_tokenizer_folder
from fd_core.ops.weights import RAW_TYPES, RawTensor, Weight

_MAX_HEADER = 100_000_000
_MAX_NAME = 1024
_MAX_DIMS = 8
_MAX_ELEMENTS = 1 << 48
DTYPE_BYTES: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the locations of the tensors of a safetensors file; `ModelError` if its header does not match the file."""
    file = MappedFile(path)
    length = int.from_bytes(file.buffer(0, 8, "the header's length"), "little")
    if length > _MAX_HEADER:
        raise _bad(path, f"its header claims {length} bytes, the limit is {_MAX_HEADER}")
    try:
        entries = msgspec.json.decode(file.buffer(8, length, "the header"), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(path, f"its header is not a JSON object: {error}") from error
    entries.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _placed(file, name, entry, start=start) for name, entry in entries.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda each: (each.offset, each.nbytes)):
        what = f"tensor {tensor.name!r}"
        file.check(tensor.offset, tensor.nbytes, what)
        if tensor.offset != end:
            relation = "overlaps the previous tensor" if tensor.offset < end else "leaves a gap before it"
            raise _bad(path, f"{what} {relation}")
        end += tensor.nbytes
    if end != file.size:
        raise _bad(path, f"its tensors end at byte {end}, but the file has {file.size}")
    return tensors


def _placed(file: MappedFile, name: str, raw: msgspec.Raw, start: int) -> StoredTensor:
    path, what = file.path, f"tensor {name[:_MAX_NAME]!r}"
    if len(name) > _MAX_NAME:
        raise _bad(path, f"{what} has a name of {len(name)} characters, the limit is {_MAX_NAME}")
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(path, f"{what}: {error}") from error
    if entry.dtype not in DTYPE_BYTES:
        raise _bad(path, f"{what} has the unknown type {entry.dtype[:40]!r}")
    # an empty tensor fits any file, so its other sizes are unchecked
    if math.prod(filter(None, entry.shape)) > _MAX_ELEMENTS:
        raise _bad(path, f"{what} has the invalid shape {str(entry.shape)[:60]}")
    begin, end = entry.data_offsets
    expected = math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]
    if end - begin != expected:
        raise _bad(path, f"{what} of shape {entry.shape} in {entry.dtype} needs {expected} bytes, got {end - begin}")
    return StoredTensor(file, name, entry.dtype, shape=tuple(entry.shape), offset=start + begin, nbytes=expected)


def _bad(path: Path, what: str) -> ModelError:
    return ModelError(
        f"{path} is not a usable safetensors file: {what}", hint="the file is damaged or its download was cut short"
    )


_ENCODER_TABLES: Final = ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")
_STACKED: Final = {".experts.gate_up_proj": 1, ".experts.down_proj": 2}
"""Tensors of all experts of a layer, and the axis of the hidden size in published files."""
_OF_IMAGES = r"visual|vision_tower|vision_model\.(blocks|ln|patch_embed)|resampler_model|multi_modal_projector"
"""Parts of a model that encode images."""
_SEPARATED: Final = ("qwen3_5_moe", "qwen3_5_moe_text")
"""Models whose files have experts [n, out, in], or one by one, as those in FP8."""
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def text_name(name: str) -> str:
    """Return the name of a tensor of a multimodal model: of its text part, without a prefix; or of Nemotron-H."""
    name = re.sub(r"^backbone\.", "model.", name)
    name = re.sub(rf"^model\.(?=({_OF_IMAGES})\.|image_newline$)", "", name)
    name = name.replace("vision_tower.vision_model.", "vision_tower.", 1)
    return re.sub(r"^(model\.)?(language|text)_model\.", lambda found: found[1] or "", name)


class SafetensorsCheckpoint(Checkpoint):
    """Tensors mapped from the shards of the index, or from a single file."""

    def __init__(self, folder: Path) -> None:
        config_path = folder / "config.json"
        if not config_path.is_file():
            raise ModelError(f"{folder} has no config.json")
        whole = read_json_object(config_path)
        config = text_part(whole)
        tensors = _open_shards(folder)
        # The names of a model that was saved without its output projection lack the prefix `model.`.
        bare = "embed_tokens.weight" in tensors
        views = quantized_views(config, str(config_path), tensors)
        views = {f"model.{name}": view for name, view in views.items()} if bare else views
        if config.get("model_type") in _SEPARATED:
            views = {part: each for name, view in views.items() for part, each in _separated(name, view)}
        views = {name: _by_columns(name, view, config.get("hidden_size")) for name, view in views.items()}
        if "text_config" in whole or "backbone.embeddings.weight" in tensors:
            views = {text_name(name): view for name, view in views.items()}
        table = next((name for name in tensors if name.endswith(_ENCODER_TABLES)), None)
        if table is not None:  # an encoder, whose names have the prefix of its output layer, or not
            prefix = table.partition("embeddings.")[0]
            views = {_encoder_name(name.removeprefix(prefix)): view for name, view in views.items()}
        super().__init__(folder, config, views, tensors.values())

    @cached_property
    def tokenizer(self) -> TokenizerSource:
        """The tokenizer's files, and the chat templates."""
        return read_tokenizer_folder(self.path)

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The object in `generation_config.json`; empty without this file."""
        path = self.path / "generation_config.json"
        return read_json_object(path) if path.is_file() else {}

    @cached_property
    def processor_config(self) -> Mapping[str, Any]:
        """The object in `preprocessor_config.json`; empty without this file."""
        path = self.path / "preprocessor_config.json"
        return read_json_object(path) if path.is_file() else {}

    def _decoded(self, tensor: StoredTensor) -> Weight:
        raise ModelError(
            f"{tensor.file.path}: tensor {tensor.name!r} is stored as {tensor.dtype}",
            hint=f"supported are {', '.join(RAW_TYPES)}, and the formats of quantization_config in config.json",
        )


def _separated(name: str, view: TensorView) -> Iterator[tuple[str, TensorView]]:
    """Yield the parts of a tensor of all experts [n, out, in] one by one; other tensors as they are."""
    block, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    if not name.endswith((*_STACKED,)) or len(view.shape) != 3 or view.shape[1] % len(parts):
        yield name, view
        return
    count, out, ins = view.shape
    stored = replace(view.tensor, shape=(count, len(parts), out // len(parts), ins))
    for index, (place, part) in product(range(count), enumerate(parts)):
        one = stored.part(index).part(place)
        yield f"{block}.{index}.{part}.weight", TensorView(one.shape, one)


def _by_columns(name: str, view: TensorView, hidden: object) -> TensorView:
    """Return a tensor of experts [n, in, out] as published; `transformers` may save it as [n, out, in]."""
    axis = next((axis for end, axis in _STACKED.items() if name.endswith(end)), None)
    if axis is None or len(view.shape) != 3 or view.shape[axis] == hidden or view.shape[3 - axis] != hidden:
        return view
    count, out, ins = view.shape
    return replace(view, shape=(count, ins, out), undo=_transposed)


def _transposed(stacked: Weight) -> RawTensor:
    raw = stacked.expanded()
    return RawTensor(raw.dtype, raw.data.swapaxes(1, 2))


def _encoder_name(name: str) -> str:
    """Return the present name of a tensor; old files name the parts of a layer norm gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _open_shards(folder: Path) -> dict[str, StoredTensor]:
    index = folder / _INDEX
    if index.is_file():
        return _from_index(index)
    single = folder / _SINGLE
    if not single.is_file():
        others = sorted(folder.glob("*.safetensors"))
        if len(others) != 1:
            names = ", ".join(each.name for each in others) or "none"
            raise ModelError(f"{folder} needs {_SINGLE} or {_INDEX}; safetensors found: {names}")
        single = others[0]
    return read_safetensors(single)


def _from_index(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    shards = {name: _open_shard(index, name) for name in dict.fromkeys(map(str, weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in shards[str(name)]:
            raise ModelError(f"{index}: expected tensor {tensor!r} in {name}, which lacks it")
    return {tensor: shards[str(name)][tensor] for tensor, name in weight_map.items()}


def _open_shard(index: Path, name: str) -> dict[str, StoredTensor]:
    if not name.endswith(".safetensors") or name != Path(name).name or "\\" in name or "\0" in name:
        raise ModelError(f"{index}: shard {name[:80]!r} is not a .safetensors file in the folder of the index")
    path = index.parent / name
    if not path.is_file():
        raise ModelError(f"{index}: shard {name} is missing", hint="download it again")
    return read_safetensors(path)
