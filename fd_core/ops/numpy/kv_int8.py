"""Keys and values in 8 bits as numpy computes them: what `Ops.write_kv` says of a quantized cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fd_core.ops.contract import SCALE_BYTES

Floats = npt.NDArray[np.float32]


def quantize_kv(x: Floats) -> npt.NDArray[np.int8]:
    """Return float32 [..., d] as int8 [..., d + 4], the scale of each last axis behind it."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore"):  # what is not finite stays so by its scale
        steps = np.rint(x / np.where(scale == 0, np.float32(1), scale)).clip(-127, 127).astype(np.int8)
    return np.concatenate([steps, scale.view(np.int8)], axis=-1)


def dequantize_kv(packed: npt.NDArray[Any]) -> Floats:
    """Return what `quantize_kv` kept: int8 [..., d + 4] to float32 [..., d]."""
    scale = np.ascontiguousarray(packed[..., -SCALE_BYTES:]).view("<f4")
    values: Floats = packed[..., :-SCALE_BYTES] * scale
    return values
