"""Weights of linear layers, packed for the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fd_core.ops.native.library import checked
from fd_core.ops.native.program import Runtime
from fd_core.weights import PackedTensor, RawTensor, Weight

__all__ = ["Arena", "NativeLinear", "pack"]

_TYPE_CODES = {"F32": 0, "BF16": 1, "F16": 2}


class Arena:
    """Memory that the weights of a pack live in; freed when the last of them goes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.handle = checked(library.fd_arena_new(), "weights")

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.fd_arena_free(self.handle)


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A packed linear."""

    handle: Any
    width: int
    """Columns of the result: of gate alone where gate and up are interleaved."""
    inputs: int
    arena: Arena


def pack(
    runtime: Runtime,
    arena: Arena,
    parts: Sequence[Weight],
    biases: Sequence[RawTensor] | None,
    *,
    gated: bool,
) -> NativeLinear:
    """Copy weights [out_i, in] and biases [out_i] into the order that the kernels read."""
    library = runtime.library
    inputs = parts[0].shape[1]
    width = parts[0].shape[0] if gated else sum(part.shape[0] for part in parts)
    handle = checked(
        library.fd_linear_new(arena.handle, width, inputs, gated, runtime.type_code, biases is not None), "weights"
    )
    column = 0
    for i, part in enumerate(parts):
        # With gate and up, `i` tells them apart; other parts follow each other.
        place = (i, 0) if gated else (0, column)
        if isinstance(part, PackedTensor):
            part = RawTensor("F32", part.to_float32())
        data = np.ascontiguousarray(part.data)
        library.fd_linear_pack(handle, *place, data.ctypes.data, _TYPE_CODES[part.dtype], part.shape[0], runtime.team)
        if biases is not None:
            bias = np.ascontiguousarray(biases[i].data)
            library.fd_linear_bias(handle, *place, bias.ctypes.data, _TYPE_CODES[biases[i].dtype], bias.size)
        column += part.shape[0]
    return NativeLinear(handle, width, inputs, arena)
