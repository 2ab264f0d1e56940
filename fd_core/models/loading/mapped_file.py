"""A read-only memory-mapped file whose every access is checked against the file's size, and the tensors in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fd_core.errors import ModelError

__all__ = ["MappedFile", "StoredTensor"]


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
            raise ModelError(f"cannot read {path}: {error.strerror or error}", field="model") from error

    def buffer(self, offset: int, length: int, what: str) -> memoryview:
        """Return the bytes of a range without a copy; `ModelError` naming `what` if they are not in the file."""
        self.check(offset, length, what)
        return self._bytes[offset : offset + length].data

    def check(self, offset: int, length: int, what: str) -> None:
        """Raise `ModelError` unless the byte range lies inside the file."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ModelError(
                f"{self.path}: {what} needs bytes {offset} to {offset + length}, but the file has {self.size}",
                field="model",
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
        """Drop this owner's reference; the mapping ends with the last view of it."""
        self._bytes = np.empty(0, np.uint8)
        self.size = 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `offset` counts from the beginning of the file, `dtype` is the format's name of the type."""

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
        """Return where entry `index` of the outermost dimension lies: the weight of one expert."""
        nbytes = self.nbytes // self.shape[0]
        return StoredTensor(self.file, self.name, self.dtype, self.shape[1:], self.offset + index * nbytes, nbytes)
