"""The safetensors container: its header checked against the file, its tensors mapped.

The `safetensors` package is not used to read: without a framework it refuses bfloat16 (numpy has no such type) and
copies every tensor, where this reader hands out views of the mapped file.

Source: https://github.com/huggingface/safetensors#format. A file is 8 bytes of header length, a JSON header and a
buffer which the tensors cover without holes or overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import RawTensor, WeightDtype
from fd_core.models.loading.mapped_file import MappedFile

__all__ = ["SafetensorsFile", "StoredTensor", "read_safetensors"]

_MAX_HEADER = 100_000_000
_MAX_DIMS = 8
_MAX_ELEMENTS = 1 << 48
_ITEM_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
_WEIGHTS: Mapping[str, tuple[WeightDtype, str]] = MappingProxyType(
    {"F32": ("F32", "<f4"), "F16": ("F16", "<f2"), "BF16": ("BF16", "<u2")}
)

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `offset` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The checked header of one file and the mapped file itself."""

    file: MappedFile
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str) -> RawTensor:
        """Return a view of a tensor; `ModelError` if its type is none of F32, F16, BF16."""
        tensor = self.tensors[name]
        if tensor.dtype not in _WEIGHTS:
            raise ModelError(
                f"{self.file.path}: tensor {name!r} is stored as {tensor.dtype}",
                field="model",
                hint=f"supported are {', '.join(_WEIGHTS)}; quantized models are served from GGUF",
            )
        dtype, code = _WEIGHTS[tensor.dtype]
        data: NDArray[Any] = self.file.view(tensor.offset, tensor.shape, np.dtype(code), f"tensor {name!r}")
        return RawTensor(dtype, data)


def read_safetensors(path: Path) -> SafetensorsFile:
    """Check the header of a safetensors file; `ModelError` if anything in it does not fit the file."""
    file = MappedFile(path)
    length = int.from_bytes(file.bytes_at(0, 8, "the header's length"), "little")
    if length > _MAX_HEADER:
        raise _bad(path, f"its header claims {length} bytes, the limit is {_MAX_HEADER}")
    header = file.bytes_at(8, length, "the header")
    start = 8 + length
    tensors = {
        name: _placed(path, name, entry, start)
        for name, entry in _entries(path, header).items()
        if name != "__metadata__"
    }
    _check_cover(file, tensors, start)
    return SafetensorsFile(file, tensors)


def _entries(path: Path, header: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(path, f"its header is not a JSON object: {error}") from error


def _placed(path: Path, name: str, raw: msgspec.Raw, start: int) -> StoredTensor:
    what = f"tensor {name!r}"
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(path, f"{what}: {error}") from error
    if entry.dtype not in _ITEM_BITS:
        raise _bad(path, f"{what} has the unknown type {entry.dtype[:40]!r}")
    # an empty tensor fits any file, whatever its other sizes claim
    if math.prod(filter(None, entry.shape)) > _MAX_ELEMENTS:
        raise _bad(path, f"{what} has the impossible shape {str(entry.shape)[:60]}")
    begin, end = entry.data_offsets
    expected = math.prod(entry.shape) * _ITEM_BITS[entry.dtype] // 8
    if end - begin != expected:
        raise _bad(path, f"{what} of shape {entry.shape} in {entry.dtype} takes {expected} bytes, not {end - begin}")
    return StoredTensor(name, entry.dtype, tuple(entry.shape), start + begin, expected)


def _check_cover(file: MappedFile, tensors: Mapping[str, StoredTensor], start: int) -> None:
    end = start
    for tensor in sorted(tensors.values(), key=lambda each: (each.offset, each.nbytes)):
        what = f"tensor {tensor.name!r}"
        file.check(tensor.offset, tensor.nbytes, what)
        if tensor.offset != end:
            relation = "overlaps what is before it" if tensor.offset < end else "leaves a hole before it"
            raise _bad(file.path, f"{what} {relation}")
        end += tensor.nbytes
    if end != file.size:
        raise _bad(file.path, f"its tensors end at byte {end}, but it has {file.size}")


def _bad(path: Path, what: str) -> ModelError:
    return ModelError(
        f"{path} is not a usable safetensors file: {what}",
        field="model",
        hint="the file is damaged or its download was cut short",
    )
