"""The safetensors container: its header checked against the file, its tensors mapped.

The `safetensors` package is not used to read: without a framework it refuses bfloat16 (numpy has no such type) and
copies every tensor, where this reader hands out views of the mapped file.

Source: https://github.com/huggingface/safetensors#format. A file is 8 bytes of header length, a JSON header and a
buffer which the tensors cover without holes or overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Final

import msgspec

from fd_core.errors import ModelError
from fd_core.models.loading.mapped_file import MappedFile, StoredTensor

__all__ = ["DTYPE_BYTES", "read_safetensors"]

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
    """Check the header of a safetensors file and return where its tensors lie, by name.

    Raises `ModelError` if anything in the header does not fit the file.
    """
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
    tensors = {name: _placed(file, name, entry, start) for name, entry in entries.items()}
    _check_cover(file, tensors.values(), start)
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
    # an empty tensor fits any file, whatever its other sizes claim
    if math.prod(filter(None, entry.shape)) > _MAX_ELEMENTS:
        raise _bad(path, f"{what} has the impossible shape {str(entry.shape)[:60]}")
    begin, end = entry.data_offsets
    expected = math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]
    if end - begin != expected:
        raise _bad(path, f"{what} of shape {entry.shape} in {entry.dtype} takes {expected} bytes, not {end - begin}")
    return StoredTensor(file, name, entry.dtype, tuple(entry.shape), start + begin, expected)


def _check_cover(file: MappedFile, tensors: Collection[StoredTensor], start: int) -> None:
    end = start
    for tensor in sorted(tensors, key=lambda each: (each.offset, each.nbytes)):
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
