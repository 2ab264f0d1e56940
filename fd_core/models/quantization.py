"""Weight quantization at load or export: round to nearest, symmetric, without calibration data."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

from fd_core.errors import ConfigError, ModelError
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.ops.contract import Ops
from fd_core.ops.weights import PackedTensor, RawTensor, Weight

INT4_GROUP: Final = 32
_CHUNK: Final = 1 << 16
"""Elements per chunk, chosen to fit the cache."""

_Floats = npt.NDArray[np.float32]


def head_format(quantization: str) -> str:
    """Return the format of the output projection for a setting: `auto`, `int8` or `int4`.

    It uses 8 bits even with int4 weights: it is a few per cent of the bytes, and every token depends on it.
    """
    return "auto" if quantization == "auto" else "int8"


def require_formats(quantization: str, ops: Ops, backend: str) -> None:
    """Raise `ConfigError` if a pack does not support the weight formats of a setting."""
    needed = {quantization, head_format(quantization)} - {"auto", *ops.weight_formats}
    if needed:
        packed = ", ".join(sorted(ops.weight_formats)) or "no packed weights"
        raise ConfigError(
            f"the {backend} backend does not support {' and '.join(sorted(needed))} weights; it supports {packed}",
            field="--quantization",
            hint="omit it, or choose another backend",
        )


def quantized(
    checkpoint: Checkpoint, name: str, form: str, change: Callable[[Weight], Weight] | None = None
) -> PackedTensor:
    """Read a weight of any stored format, change and quantize it. Raises `ModelError` if that fails."""
    try:
        read = checkpoint.read(name)
        return quantize(read if change is None else change(read).expanded(), form)
    except ValueError as error:
        raise ModelError(
            f"{checkpoint.path}: tensor {name!r} cannot be quantized to {form}: {error}", field="--quantization"
        ) from error


def quantize(weight: RawTensor, form: str) -> PackedTensor:
    """Quantize a weight [out, in]: `int8` with one scale per row, `int4` with one per 32 values of a row.

    Raises `ValueError` for values that are not finite and for rows that are not a multiple of the group size.
    """
    out, width = weight.shape
    group = width if form == "int8" else INT4_GROUP
    if width % group:
        raise ValueError(f"rows of {width} values are not a multiple of the group size {group}")
    values = np.empty((out, width), np.int8)
    scales = np.empty((out, width // group), np.float32)
    rows = max(1, _CHUNK // width)

    def fill(begin: int) -> None:
        part = slice(begin, begin + rows)
        floats = RawTensor(weight.dtype, weight.data[part]).to_float32().reshape(-1, width // group, group)
        if not np.isfinite(floats).all():
            raise ValueError("it has values that are not finite")
        scales[part] = np.abs(floats).max(axis=-1) / np.float32(127) if form == "int8" else _int4_scales(floats)
        values[part] = _rounded(floats, scales[part], 127 if form == "int8" else 7).reshape(-1, width)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # numpy releases the GIL
        for _ in pool.map(fill, range(0, out, rows)):
            pass
    return PackedTensor(form, 8 if form == "int8" else 4, values, scales=scales)


def _int4_scales(groups: _Floats) -> _Floats:
    """Return bfloat16 scales, with the sign that maps the largest value to -8, because int4 has no +8.

    Scales that clip the largest value have a smaller squared error but a higher perplexity.
    """
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    scales = RawTensor("F32", np.where(-low > high, low, high) * np.float32(-1 / 8))
    return RawTensor("BF16", bfloat16_bits(scales)).to_float32()


def bfloat16_bits(weight: RawTensor) -> npt.NDArray[np.uint16]:
    """Return finite values as the bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(weight.to_float32()).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _rounded(groups: _Floats, scales: _Floats, most: int) -> _Floats:
    """Return integers from -most - 1 to most; 0 where the inverse of the scale is not finite."""
    usable = np.abs(scales) > np.finfo(np.float32).tiny
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=usable)
    values = groups * inverse[..., np.newaxis]
    return np.clip(np.rint(values, out=values), -most - 1, most, out=values)
