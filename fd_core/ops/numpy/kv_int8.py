"""Reference quantization of keys and values to 8 bits, as specified by `Ops.write_kv`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import SCALE_BYTES

Floats = npt.NDArray[np.float32]


def quantize_kv(x: Floats) -> npt.NDArray[np.int8]:
    """Quantize float32 [..., d] to int8 [..., d + 4], with the scale after the elements."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore"):  # values that are not finite are restored by the scale
        steps = np.rint(x / np.where(scale == 0, np.float32(1), scale)).clip(-127, 127).astype(np.int8)
    return np.concatenate([steps, scale.view(np.int8)], axis=-1)


def dequantize_kv(packed: npt.NDArray[Any]) -> Floats:
    """Dequantize the result of `quantize_kv`: int8 [..., d + 4] to float32 [..., d]."""
    scale = np.ascontiguousarray(packed[..., -SCALE_BYTES:]).view("<f4")
    values: Floats = packed[..., :-SCALE_BYTES] * scale
    return values


def quantize_latent(key: Floats, value: Floats) -> npt.NDArray[np.int8]:
    """Quantize the parts of latent vectors, each with its scale."""
    return np.concatenate([quantize_kv(key), quantize_kv(value)], axis=-1)


def dequantize_latent(packed: npt.NDArray[Any], latent: int) -> Floats:
    """Dequantize the result of `quantize_latent`, whose values have `latent` elements, to whole keys."""
    parts = np.split(packed, [packed.shape[-1] - latent - SCALE_BYTES], axis=-1)
    return np.concatenate([dequantize_kv(part) for part in parts], axis=-1)
