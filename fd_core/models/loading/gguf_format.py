"""The GGUF container, parsed strictly: every count, length and offset is checked before it is used.

The `gguf` package supplies the constants and the dequantization. Its reader is not used: it trusts the counts in the
file, so a damaged one would hang it, and it builds several arrays for each string, which takes 35 times as long for a
vocabulary of 50,000 tokens and as many merges.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from fd_core.errors import ModelError
from fd_core.models.loading.files import MappedFile, StoredTensor
from fd_core.ops.weights import FP4_HALVES, PackedTensor, mxfp4_scales, row_blocks

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_STRING = 64 << 20
_MAX_KEY = 65_535
_MAX_NAME = 1024
_MAX_ARRAY = 1 << 23
_DEFAULT_ALIGNMENT = 32
_SMALLEST_INFO = 8 + 4 + 8 + 4 + 8

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?"}
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


_TensorInfo = tuple[str, tuple[int, ...], int, int]
"""Name, dimensions (innermost first), type number, and offset from the end of the header."""


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the metadata and the tensors of a GGUF file by name; `ModelError` if its header does not fit the file."""
    file = MappedFile(path)
    cursor = _Cursor(file)
    if cursor.take(4, "the magic number") != _MAGIC:
        raise _bad(path, "it does not begin with GGUF")
    version = cursor.u32("the version")
    if version not in _VERSIONS:
        what = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
        raise _bad(path, f"{what} is not supported; versions 2 and 3, little endian, are")
    tensor_count = cursor.u64("the number of tensors")
    pair_count = cursor.u64("the number of metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string("a metadata key", _MAX_KEY)
        if key in metadata:
            raise _bad(path, f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.u32(key), key)
    if tensor_count * _SMALLEST_INFO > file.size - cursor.offset:
        raise _bad(path, f"{tensor_count} tensor descriptions do not fit the rest of the file")
    infos = [cursor.tensor_info() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _bad(path, f"general.alignment must be a power of two, not {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    return metadata, _place(file, infos, start)


def _place(file: MappedFile, infos: Iterable[_TensorInfo], start: int) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name, dims, number, distance in infos:
        what = f"tensor {name!r}"
        if name in tensors:
            raise _bad(file.path, f"{what} appears twice")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise _bad(file.path, f"{what} has the unknown type number {number}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if dims[0] % block:
            raise _bad(file.path, f"{what}: rows of {dims[0]} are not whole {kind.name} blocks of {block}")
        nbytes = math.prod(dims) // block * block_bytes
        file.check(start + distance, nbytes, what)
        tensors[name] = StoredTensor(file, name, kind.name, shape=dims[::-1], offset=start + distance, nbytes=nbytes)
    end, before = start, "the header"
    for tensor in sorted(tensors.values(), key=lambda each: each.offset):
        if tensor.offset < end:
            raise _bad(file.path, f"tensor {tensor.name!r} overlaps {before}")
        end, before = tensor.offset + tensor.nbytes, f"tensor {tensor.name!r}"
    return tensors


def _bad(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is not a usable GGUF file: {what}")


class _Cursor:
    """Sequential reader of the header; a read beyond the end of the file raises `ModelError`."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.offset = 0
        self._buffer = file.buffer(0, file.size, "the file")

    def take(self, length: int, what: str) -> bytes:
        if self.offset + length > self.file.size:
            self.file.check(self.offset, length, what)
        begin = self.offset
        self.offset = begin + length
        return bytes(self._buffer[begin : self.offset])

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def string(self, what: str, limit: int = _MAX_STRING) -> str:
        length = self.u64(what)
        if length > limit:
            raise _bad(self.file.path, f"{what} has {length} bytes, the limit is {limit}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise _bad(self.file.path, f"{what} is not UTF-8") from error

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY:
            return self._scalars(kind, 1, key)[0]
        kind, count = self.u32(key), self.u64(key)
        if count > _MAX_ARRAY:
            raise _bad(self.file.path, f"{key} has {count} elements, the limit is {_MAX_ARRAY}")
        if kind != _STRING:
            return self._scalars(kind, count, key)
        self.file.check(self.offset, 8 * count, key)
        return self._strings(count, key)

    def _strings(self, count: int, key: str) -> list[str]:
        """Read many strings as `string` reads one: a vocabulary has a hundred thousand, so each takes few calls."""
        buffer, end, length_at = self._buffer, self.offset, _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                begin = end + 8
                end = begin + length_at(buffer, end)[0]
                if end - begin > _MAX_STRING or end > self.file.size:
                    break
                found.append(str(buffer[begin:end], "utf-8"))
                self.offset = end
        except (struct.error, UnicodeDecodeError):
            pass
        while len(found) < count:
            found.append(self.string(key))  # says what is wrong
        return found

    def _scalars(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise _bad(self.file.path, f"{key} has the unsupported value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        content = self.take(count * dtype.itemsize, key)
        if kind == _BOOL:
            return [byte != 0 for byte in content]
        return list(np.frombuffer(content, dtype).tolist())

    def tensor_info(self) -> _TensorInfo:
        name = self.string("a tensor's name", _MAX_NAME)
        what = f"tensor {name!r}"
        dimensions = self.u32(what)
        if not 1 <= dimensions <= _MAX_DIMS:
            raise _bad(self.file.path, f"{what} has {dimensions} dimensions; 1 to {_MAX_DIMS} are possible")
        dims = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions, what))
        if 0 in dims:
            raise _bad(self.file.path, f"{what} is empty")
        return name, dims, self.u32(what), self.u64(what)


_Blocks = npt.NDArray[Any]
"""Structured [out, blocks of a row]."""
_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Parts = tuple[npt.NDArray[np.integer[Any]], _Floats, _Floats | None]
"""Values [out, blocks, ...] from 0, or signed; scales and minima [out, blocks, groups of a block]."""


def unpack_blocks(kind: str, packed: _Bytes) -> PackedTensor:
    """Unpack rows of blocks, uint8[out, bytes of a row]; `kind` is one of `PACKED_TYPES`."""
    layout, bits, offset, unpack = _TYPES[kind]
    out = len(packed)
    with np.errstate(invalid="ignore", over="ignore"):
        values, scales, minima = unpack(packed.view(layout))
    signed = values.reshape(out, -1).view(np.int8)
    if offset:
        signed -= np.int8(offset)
    flat = None if minima is None else minima.reshape(out, -1)
    units = _units(packed.view(layout)) if "scales" in (layout.names or ()) else None
    return PackedTensor(kind, bits, signed, scales=scales.reshape(out, -1), minima=flat, units=units)


def _nibbles(packed: _Bytes, run: int) -> _Bytes:
    """Return the low halves of each run of bytes, then the high ones: [..., n] becomes [..., n / run, 2, run]."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    halves = np.empty((*runs.shape[:-1], 2, run), np.uint8)
    np.bitwise_and(runs, 15, out=halves[..., 0, :])
    np.right_shift(runs, 4, out=halves[..., 1, :])
    return halves


def _floats(halves: _Blocks) -> _Floats:
    """Return a field of float16 as float32, with an axis for the groups of a block."""
    return halves.astype(np.float32)[..., np.newaxis]


def _q4(blocks: _Blocks) -> _Parts:
    return _nibbles(blocks["qs"], 16), _floats(blocks["d"]), _minimum(blocks)


def _q5(blocks: _Blocks) -> _Parts:
    values = _nibbles(blocks["qs"], 16).reshape(*blocks.shape, 32)
    values |= np.unpackbits(blocks["qh"], axis=-1, bitorder="little") << 4
    return values, _floats(blocks["d"]), _minimum(blocks)


def _units(blocks: _Blocks) -> _Floats:
    """Return what scales, and minima, are multiples of."""
    return np.stack([blocks[name].astype(np.float32) for name in ("d", "m") if name in (blocks.dtype.names or ())], -1)


def _minimum(blocks: _Blocks) -> _Floats | None:
    return _floats(blocks["m"]) if "m" in (blocks.dtype.names or ()) else None


def _q4_k(blocks: _Blocks) -> _Parts:
    return _nibbles(blocks["qs"], 32), *_k_scales(blocks)


def _q5_k(blocks: _Blocks) -> _Parts:
    values = _nibbles(blocks["qs"], 32).reshape(*blocks.shape, 8, 32)
    for group in range(8):
        values[..., group, :] |= ((blocks["qh"] >> group) & 1) << 4
    return values, *_k_scales(blocks)


def _k_scales(blocks: _Blocks) -> tuple[_Floats, _Floats]:
    """Return scales and minima of 8 groups: 6 bits each, in 12 bytes."""
    low, middle, mixed = (blocks["scales"][..., begin : begin + 4] for begin in (0, 4, 8))
    scales = np.concatenate([low & 63, (mixed & 15) | ((low >> 2) & 48)], axis=-1)
    minima = np.concatenate([middle & 63, (mixed >> 4) | ((middle >> 2) & 48)], axis=-1)
    return _floats(blocks["d"]) * scales.astype(np.float32), -(_floats(blocks["m"]) * minima.astype(np.float32))


def _q6_k(blocks: _Blocks) -> _Parts:
    values = _nibbles(blocks["ql"], 64).reshape(*blocks.shape, 2, 4, 32)
    for part, high in enumerate(np.moveaxis(blocks["qh"].reshape(*blocks.shape, 2, 32), -2, 0)):
        for pair in range(4):
            values[..., part, pair, :] |= ((high >> (2 * pair)) & 3) << 4
    return values, _floats(blocks["d"]) * blocks["scales"].astype(np.float32), None


def _mxfp4(blocks: _Blocks) -> _Parts:
    return FP4_HALVES[_nibbles(blocks["qs"], 16)].view(np.uint8), mxfp4_scales(blocks["e"])[..., np.newaxis], None


_D, _M, _K_SCALES = ("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12)
_TYPES: Final[Mapping[str, tuple[np.dtype[Any], int, int, Callable[[_Blocks], _Parts]]]] = {
    "Q4_0": (np.dtype([_D, ("qs", "u1", 16)]), 4, 8, _q4),
    "Q4_1": (np.dtype([_D, _M, ("qs", "u1", 16)]), 4, 0, _q4),
    "Q5_0": (np.dtype([_D, ("qh", "u1", 4), ("qs", "u1", 16)]), 5, 16, _q5),
    "Q5_1": (np.dtype([_D, _M, ("qh", "u1", 4), ("qs", "u1", 16)]), 5, 0, _q5),
    "Q8_0": (np.dtype([_D, ("qs", "i1", 32)]), 8, 0, lambda blocks: (blocks["qs"].copy(), _floats(blocks["d"]), None)),
    "Q4_K": (np.dtype([_D, _M, _K_SCALES, ("qs", "u1", 128)]), 4, 0, _q4_k),
    "Q5_K": (np.dtype([_D, _M, _K_SCALES, ("qh", "u1", 32), ("qs", "u1", 128)]), 5, 0, _q5_k),
    "MXFP4": (np.dtype([("e", "u1"), ("qs", "u1", 16)]), 8, 0, _mxfp4),
    "Q6_K": (np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D]), 6, 32, _q6_k),
}
"""For each type: block layout, bits of a value, offset subtracted from each value, and the function that unpacks
blocks."""

PACKED_TYPES: Final = tuple(_TYPES)
"""GGUF types that stay packed if the pack supports them."""


def packed_blocks(kind: str, stored: _Bytes, check: Callable[[PackedTensor], PackedTensor]) -> PackedTensor:
    """Return a weight that is unpacked by `unpack_blocks` when its values are needed.

    `check` returns an unpacked tensor, or raises if it is damaged.
    """
    return _PackedBlocks(kind, stored, check)


class _PackedBlocks(PackedTensor):
    """A quantized weight in the blocks of its file."""

    _stored: _Bytes
    _check: Callable[[PackedTensor], PackedTensor]

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        """Let `dataclasses.replace` return an unpacked tensor."""
        return PackedTensor(**fields) if fields else super().__new__(cls)

    def __init__(self, kind: str, stored: _Bytes, check: Callable[[PackedTensor], PackedTensor]) -> None:
        # The base class is frozen.
        vars(self).update(_stored=stored, _check=check)
        object.__setattr__(self, "format", kind)
        object.__setattr__(self, "bits", _TYPES[kind][1])

    @property
    def shape(self) -> tuple[int, ...]:
        rows, row_bytes = self._stored.shape
        size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.format]]
        return rows, row_bytes // nbytes * size

    @property
    def group(self) -> int:
        return 16 if self.format == "Q6_K" else 32

    @property
    def has_minima(self) -> bool:
        return "m" in (_TYPES[self.format][0].names or ())

    @property
    def has_units(self) -> bool:
        return "scales" in (_TYPES[self.format][0].names or ())

    @property
    def half_scales(self) -> bool:
        if self.format == "MXFP4":
            exponents = self._stored.view(_TYPES[self.format][0])["e"]
            return bool(((exponents >= 104) & (exponents <= 143)).all())
        return not self.has_units

    @cached_property
    def _unpacked(self) -> PackedTensor:
        return self._check(unpack_blocks(self.format, self._stored))

    @property
    def values(self) -> npt.NDArray[np.int8]:
        return self._unpacked.values

    @property
    def scales(self) -> _Floats:
        return self._unpacked.scales

    @property
    def minima(self) -> _Floats | None:
        return self._unpacked.minima

    @property
    def units(self) -> _Floats | None:
        return self._unpacked.units

    def take_rows(self, order: npt.NDArray[np.integer[Any]] | slice) -> _PackedBlocks:
        return _PackedBlocks(self.format, self._stored[order], self._check)

    def blocks(self) -> Iterator[PackedTensor]:
        return map(self.take_rows, row_blocks(self.shape, self._stored))
