"""GGUF's quantized blocks taken apart: whole numbers, scales and minima.

Each value is the one that ggml's own dequantization gives, bit for bit: the same products and sums, rounded the same.

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (the layouts of blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.ops.weights import PackedTensor

__all__ = ["PACKED_TYPES", "unpack_blocks"]

_Blocks = npt.NDArray[Any]
"""Structured [out, blocks of a row]."""
_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Parts = tuple[npt.NDArray[np.integer[Any]], _Floats, _Floats | None]
"""Values [out, blocks, ...] from 0, or signed; scales and minima [out, blocks, groups of a block]."""


def unpack_blocks(kind: str, packed: _Bytes) -> PackedTensor:
    """Take rows of blocks apart, uint8[out, bytes of a row]; `kind` is one of `PACKED_TYPES`."""
    layout, bits, offset, unpack = _TYPES[kind]
    out = len(packed)
    values, scales, minima = unpack(packed.view(layout))
    signed = values.reshape(out, -1).view(np.int8)
    if offset:
        signed -= np.int8(offset)
    flat = None if minima is None else minima.reshape(out, -1)
    return PackedTensor(kind, bits, signed, scales.reshape(out, -1), flat)


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


def _q8_0(blocks: _Blocks) -> _Parts:
    return blocks["qs"].copy(), _floats(blocks["d"]), None


def _q4(blocks: _Blocks) -> _Parts:
    return _nibbles(blocks["qs"], 16), _floats(blocks["d"]), _minimum(blocks)


def _q5(blocks: _Blocks) -> _Parts:
    values = _nibbles(blocks["qs"], 16).reshape(*blocks.shape, 32)
    values |= np.unpackbits(blocks["qh"], axis=-1, bitorder="little") << 4
    return values, _floats(blocks["d"]), _minimum(blocks)


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


def _layout(*fields: tuple[Any, ...]) -> np.dtype[Any]:
    return np.dtype(list(fields))


_D, _M, _K_SCALES = ("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12)
_TYPES: Final[Mapping[str, tuple[np.dtype[Any], int, int, Callable[[_Blocks], _Parts]]]] = {
    "Q4_0": (_layout(_D, ("qs", "u1", 16)), 4, 8, _q4),
    "Q4_1": (_layout(_D, _M, ("qs", "u1", 16)), 4, 0, _q4),
    "Q5_0": (_layout(_D, ("qh", "u1", 4), ("qs", "u1", 16)), 5, 16, _q5),
    "Q5_1": (_layout(_D, _M, ("qh", "u1", 4), ("qs", "u1", 16)), 5, 0, _q5),
    "Q8_0": (_layout(_D, ("qs", "i1", 32)), 8, 0, _q8_0),
    "Q4_K": (_layout(_D, _M, _K_SCALES, ("qs", "u1", 128)), 4, 0, _q4_k),
    "Q5_K": (_layout(_D, _M, _K_SCALES, ("qh", "u1", 32), ("qs", "u1", 128)), 5, 0, _q5_k),
    "Q6_K": (_layout(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D), 6, 32, _q6_k),
}
"""Of each type: the layout of a block, bits of a value, what is taken from each value, and what takes blocks apart."""

PACKED_TYPES: Final = tuple(_TYPES)
"""Types of GGUF that are computed as they are where the pack can."""
