"""Description of how llama.cpp's converter stores one family of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fd_core.errors import ModelError
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.files import StoredTensor

StoredTensors = Mapping[str, StoredTensor]
"""Tensors of a GGUF file by their name there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """Differences from the usual names and values."""

    config: Callable[[ModelConfig, StoredTensors], dict[str, Any]] = lambda shape, tensors: {}
    """Returns the fields of `config.json` that the common metadata do not give, from the architecture's own metadata,
    named without its prefix, and the tensors."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer whose name differs from the usual one: GGUF's name to Hugging Face's, with `{}` for the index
    of an expert."""
    top: Mapping[str, str] = field(default_factory=dict)
    """The same of tensors outside of layers, with whole names."""
    permuted: bool = False
    """True if the rows of q and k were permuted for interleaved rope."""
    tiled: bool = False
    """True if the heads of values of recurrent layers are in turns of one for each head of keys."""
    norm_offset: float = 0.0
    """Number that was added to the norm weights."""
    mtp: Mapping[str, str] | None = None
    """If the family has a layer for multi-token prediction: the beginnings of the names of its tensors that differ from
    those of DeepSeek, without `model.layers.N.`, to whole ones. Its tensors are not read otherwise."""


def windows(shape: ModelConfig, every: int = 4, window: int | None = None) -> dict[str, Any]:
    """Return the window, by default `window`, and the layers that use it.

    The file lists them, or has another number than `every`: every so many layers, the last one does not.
    """
    key = "attention.sliding_window_pattern"
    layers, given = range(shape.count("block_count")), shape.values.get(key, every)
    if isinstance(given, int) and not isinstance(given, bool):
        period = shape.index(key, every)
        given = [not period or (layer + 1) % period > 0 for layer in layers]
    if not isinstance(given, list | tuple) or len(given) != len(layers):
        raise ModelError(f"{shape.origin}: {shape.prefix}{key} must list {len(layers)} layers, or be an integer")
    window = shape.optional_count("attention.sliding_window", window)
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if window and each else "full_attention" for each in given],
    }


def layers_with(shape: ModelConfig, key: str) -> list[bool]:
    """Return whether each layer has a number above 0 of what `key` counts; all have without a list."""
    layers = shape.count("block_count")
    listed = shape.values.get(f"{key}.layers", [1] * layers)
    if len(listed) != layers:
        raise ModelError(f"{shape.origin}: {shape.prefix}{key} must list {layers} layers")
    return [each > 0 for each in listed]


KnownGguf = Mapping[str, tuple[str, str, Gguf]]
"""Name in `general.architecture` -> architecture and model type in `config.json`, and how the files are stored."""
