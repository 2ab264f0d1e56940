"""Rotary embedding: frequencies from the config, tables for the device.

Su et al., "RoFormer" (2021); linear scaling, Llama 3.1's scaling by wavelength, and YaRN (Peng et al., 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fd_core.errors import ModelError
from fd_core.models.loading.config import ModelConfig
from fd_core.ops.contract import Ops, Rope

_SUPPORTED = ("default", "linear", "llama3", "yarn")
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Frequencies of one kind of layer; equal specs share their tables."""

    inverse_frequencies: tuple[float, ...]
    """Frequency of each pair of elements, radians per position."""
    amplitude: float = 1.0
    """Factor on cosine and sine; YaRN uses it to sharpen attention."""
    interleaved: bool = False


def rope_spec(config: ModelConfig, head_dim: int, *, theta: float, interleaved: bool = False) -> RopeSpec:
    """Return the frequencies that a config asks for, `theta` being the family's base where the config has none."""
    part = config.part("rope_parameters") or config.part("rope_scaling")
    return scaled_rope_spec(config, part, head_dim, theta=config.number("rope_theta", theta), interleaved=interleaved)


def scaled_rope_spec(
    config: ModelConfig, part: ModelConfig | None, head_dim: int, *, theta: float, interleaved: bool = False
) -> RopeSpec:
    """Return the frequencies for a part of the config such as `{"rope_type": "linear", "factor": 8}`."""
    part = part or ModelConfig({})
    kind = part.text("rope_type", part.text("type", "default"))
    if kind not in _SUPPORTED:
        raise ModelError(
            f"{config.origin}: rope type {kind!r} is not supported",
            field="model",
            hint=f"one of {', '.join(_SUPPORTED)}",
        )
    theta = part.number("rope_theta", theta)
    share = part.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotary = int(head_dim * min(share, 2.0))
    if rotary % 2 or not 0 < rotary <= head_dim:
        raise ModelError(f"{config.origin}: rope cannot rotate {rotary} of {head_dim} elements in pairs", field="model")
    frequencies = theta ** -(np.arange(0, rotary, 2) / rotary)
    amplitude = 1.0
    try:
        if kind == "linear":
            frequencies = frequencies / part.number("factor")
        elif kind == "llama3":
            frequencies = _llama3(frequencies, part, config)
        elif kind == "yarn":
            frequencies, amplitude = _yarn(frequencies, theta, part, config)
    except (ArithmeticError, ValueError) as error:  # numbers that are too large or too small to compute with
        raise ModelError(f"{config.origin}: rope of type {kind} cannot be computed: {error}", field="model") from error
    if not np.isfinite([*frequencies, amplitude]).all():
        raise ModelError(f"{config.origin}: rope's numbers make no finite frequencies", field="model")
    return RopeSpec(tuple(frequencies.tolist()), amplitude, interleaved)


def rope_tables(spec: RopeSpec, max_positions: int, ops: Ops) -> Rope:
    """Compute cosines and sines for positions 0 to max_positions - 1.

    Angles are rounded to float32 as in the code that models are trained with: an exact angle would differ from it
    at long positions.
    """
    frequencies = np.array(spec.inverse_frequencies, np.float32)
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * frequencies
    amplitude = np.float32(spec.amplitude)
    return Rope(
        cos=ops.prepare_vector(np.cos(angles) * amplitude),
        sin=ops.prepare_vector(np.sin(angles) * amplitude),
        interleaved=spec.interleaved,
    )


def _llama3(frequencies: Doubles, part: ModelConfig, config: ModelConfig) -> Doubles:
    """Divide low frequencies by the factor, keep high ones, and blend in between."""
    original = part.count("original_max_position_embeddings", config.optional_count("max_position_embeddings"))
    low, high = part.number("low_freq_factor"), part.number("high_freq_factor")
    if low >= high:
        raise ModelError(f"{config.origin}: rope's low_freq_factor must be below its high_freq_factor", field="model")
    turns = original * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(frequencies * (share + (1.0 - share) / part.number("factor")))


def _yarn(frequencies: Doubles, theta: float, part: ModelConfig, config: ModelConfig) -> tuple[Doubles, float]:
    """Interpolate the frequencies that turn less than once over the original context, keep the fast ones."""
    factor = part.number("factor")
    original = part.count("original_max_position_embeddings", config.optional_count("max_position_embeddings"))
    pairs = len(frequencies)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    low = pair_that_turns(part.number("beta_fast", 32.0))
    high = pair_that_turns(part.number("beta_slow", 1.0))
    if part.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    interpolated = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0.0, 1.0)
    scaled = np.asarray(frequencies * (1.0 - interpolated + interpolated / factor))
    amplitude = part.optional_number("attention_factor")
    if amplitude is None:
        numerator, denominator = part.optional_number("mscale"), part.optional_number("mscale_all_dim")
        both = numerator is not None and denominator is not None
        amplitude = _mscale(factor, numerator or 1.0) / _mscale(factor, denominator or 1.0) if both else _mscale(factor)
    return scaled, amplitude


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
