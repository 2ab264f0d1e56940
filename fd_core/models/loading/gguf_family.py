"""Description of how llama.cpp's converter stores one family of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """Tensors of a layer whose name differs from the usual one: GGUF's name to Hugging Face's."""
    permuted: bool = False
    """True if the rows of q and k were permuted for interleaved rope."""
    norm_offset: float = 0.0
    """Number that was added to the norm weights."""


KnownGguf = Mapping[str, tuple[str, str, Gguf]]
"""Name in `general.architecture` -> architecture and model type in `config.json`, and how the files are stored."""
