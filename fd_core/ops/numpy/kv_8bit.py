"""Reference conversion of keys and values to 8 bits and back, as specified by `Ops.write_kv`."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import KV_TYPES, SCALE_BYTES
from fd_core.ops.weights import FP8_VALUES

Floats = npt.NDArray[np.float32]

_FP8_NAN: Final = 127
_FP8_MIDDLES: Final = (FP8_VALUES[: _FP8_NAN - 1] + FP8_VALUES[1:_FP8_NAN]) / np.float32(2)
"""Numbers halfway between two neighbours, exact in float32; the codes of magnitudes are in their order."""


def quantize_kv(x: Floats, dtype: str = "int8") -> npt.NDArray[Any]:
    """Convert float32 [..., d] to a dtype of `KVShape`: int8 [..., d + 4] with the scale last, or FP8 bits [..., d].

    Of `auto`, they are returned as they are.
    """
    if dtype == "auto":
        return x
    if dtype == "fp8":
        return _fp8_bits(x)
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore"):  # values that are not finite are restored by the scale
        steps = np.rint(x / np.where(scale == 0, np.float32(1), scale)).clip(-127, 127).astype(np.int8)
    return np.concatenate([steps, scale.view(np.int8)], axis=-1)


def dequantize_kv(held: npt.NDArray[Any]) -> Floats:
    """Convert the result of `quantize_kv` to float32 [..., d]."""
    values: Floats = held
    if held.dtype == KV_TYPES["fp8"]:
        values = FP8_VALUES[held]
    elif held.dtype == KV_TYPES["int8"]:
        values = held[..., :-SCALE_BYTES] * np.ascontiguousarray(held[..., -SCALE_BYTES:]).view("<f4")
    return values


def quantize_latent(key: Floats, value: Floats, dtype: str = "int8") -> npt.NDArray[Any]:
    """Convert the parts of latent vectors, each with its scale if it has one."""
    return np.concatenate([quantize_kv(key, dtype), quantize_kv(value, dtype)], axis=-1)


def dequantize_latent(held: npt.NDArray[Any], latent: int) -> Floats:
    """Convert the result of `quantize_latent`, whose values have `latent` elements, to whole keys in float32."""
    end = latent + (SCALE_BYTES if held.dtype == KV_TYPES["int8"] else 0)
    return np.concatenate([dequantize_kv(part) for part in np.split(held, [held.shape[-1] - end], axis=-1)], axis=-1)


def _fp8_bits(x: Floats) -> npt.NDArray[np.uint8]:
    """Round to the nearest number of FP8, of two the one with an even code; at most the largest, NaN unless finite."""
    size = np.abs(x)
    below, above = (np.searchsorted(_FP8_MIDDLES, size, side) for side in ("left", "right"))
    codes = np.where(np.isfinite(x), np.where(below % 2, above, below), _FP8_NAN)
    bits: npt.NDArray[np.uint8] = (codes + 128 * np.signbit(x)).astype(np.uint8)
    return bits
