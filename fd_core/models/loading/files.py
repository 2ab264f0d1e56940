"""Checkpoint files: memory mapping, digests, and JSON with size limits."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from fd_core.errors import ModelError
from fd_core.ops.weights import release_pages

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
PICKLE_HINT = (
    "pickled weights can run code when opened; use a safetensors or GGUF version of the model, or "
    "convert it if you trust the file: load it with transformers and call save_pretrained()"
)


class MappedFile:
    """One file, mapped once. Slices are views: they cost address space, not memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
            # numpy refuses to map an empty file
            self._bytes: NDArray[np.uint8] = (
                np.memmap(path, dtype=np.uint8, mode="r") if self.size else np.empty(0, np.uint8)
            )
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error

    def buffer(self, offset: int, length: int, what: str) -> memoryview:
        """Return the bytes of a range without a copy; `ModelError` naming `what` if they are not in the file."""
        self.check(offset, length, what)
        return self._bytes[offset : offset + length].data

    def check(self, offset: int, length: int, what: str) -> None:
        """Raise `ModelError` unless the byte range is inside the file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ModelError(
                f"{self.path}: {what} needs bytes {offset} to {offset + length}, but the file has {self.size}",
                hint="the file is damaged or its download was cut short",
            )

    def view(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike, what: str) -> NDArray[Any]:
        """Return an array over the file's bytes, without a copy where the offset is aligned for `dtype`."""
        kind = np.dtype(dtype)
        length = math.prod(shape) * kind.itemsize
        self.check(offset, length, what)
        flat = self._bytes[offset : offset + length].view(np.ndarray)
        if offset % kind.itemsize:
            flat = flat.copy()
        return flat.view(kind).reshape(shape)

    def close(self) -> None:
        """Drop this reference; the file is unmapped with its last view."""
        self._bytes = np.empty(0, np.uint8)
        self.size = 0

    def release(self) -> None:
        """Unload the pages that were read; see `release_pages`."""
        release_pages(self._bytes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor: `offset` counts from the start of the file, `dtype` is the format's name of the type."""

    file: MappedFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    """The outermost dimension first."""
    offset: int
    nbytes: int

    def view(self, dtype: DTypeLike, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """Return the stored bytes as an array of `dtype`, in another `shape` if one is given; see `MappedFile.view`."""
        return self.file.view(self.offset, self.shape if shape is None else shape, dtype, f"tensor {self.name!r}")

    def part(self, index: int) -> StoredTensor:
        """Return the slice of entry `index` of the outermost dimension: the weight of one expert."""
        nbytes = self.nbytes // self.shape[0]
        return StoredTensor(self.file, self.name, self.dtype, self.shape[1:], self.offset + index * nbytes, nbytes)


_WHOLE = 32 << 20
_PAGE = 4096
_SAMPLES = 1024


def digest_of(config: Mapping[str, Any], tensors: Iterable[StoredTensor]) -> str:
    """Return the hex SHA-256 over the config and the content of each file that holds some of the tensors.

    A file of up to 32 MiB is covered whole. Of a larger one it covers the size, the first 4 KiB (the header
    begins there), 4 KiB at the start of each tensor and 1,024 pages of 4 KiB spread evenly over the file: about
    5 MB of reading for a model of any size.
    """
    total = hashlib.sha256(b"fd_core weights 1\n")
    total.update(json.dumps(config, sort_keys=True, default=str).encode())
    offsets: dict[MappedFile, set[int]] = {}
    for tensor in tensors:
        offsets.setdefault(tensor.file, {0}).add(tensor.offset)
    for file in sorted(offsets, key=lambda each: each.path.name):
        total.update(f"\nfile {file.size}\n".encode())
        if file.size <= _WHOLE:
            total.update(file.buffer(0, file.size, "the file"))
        else:
            spread = (index * (file.size - _PAGE) // (_SAMPLES - 1) for index in range(_SAMPLES))
            for offset in sorted(offsets[file].union(spread)):
                total.update(file.buffer(offset, min(_PAGE, file.size - offset), "a page"))
        file.release()
    return total.hexdigest()


_LIMIT = 64 << 20
_INFINITY: Final = re.compile(rb"(?<=[\s\[,:])Infinity\b")
"""As Python writes it, and transformers did before it wrote an object in its place."""


def read_limited(path: Path, limit: int = _LIMIT) -> bytes:
    """Read a whole file of at most `limit` bytes; `ModelError` if it is larger or cannot be read."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise ModelError(f"{path} has {size} bytes, the limit is {limit}")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file whose top level is an object. Raises `ModelError`, with the file, otherwise."""
    return parse_json_object(read_limited(path), str(path))


def parse_json_object(content: bytes, origin: str) -> dict[str, Any]:
    """Parse JSON whose top level is an object. Raises `ModelError`, with `origin`, otherwise."""
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if (standard := _INFINITY.sub(b'{"__float__":"Infinity"}', content)) != content:
            return parse_json_object(standard, origin)
        raise ModelError(f"{origin} is not a JSON object: {error}") from error
